"""The warm-up request of an attention server: SGLang's would end the server when it fails."""

from __future__ import annotations

import logging
import os
import threading

import requests

from sglang_afd.attn.status import LinkState, StatusBoard
from sglang_afd.upstream import http_server
from sglang_afd.upstream.server_args import ServerArgs

logger = logging.getLogger(__name__)

POLL_S = 0.1
TIMEOUT_S = 600.0  # of one request; the first one may compile kernels
NUM_TOKENS = 8


def warm_up(board: StatusBoard, is_stopping: threading.Event, server_args: ServerArgs) -> bool:
    """Generate a few tokens through the MLP servers, again whenever they went away meanwhile.

    Returns: True once it worked, False when the server stops before. Any other failure than a lost
        MLP server ends the process.
    """
    while not is_stopping.wait(POLL_S):
        if board.read().state is not LinkState.READY:
            continue
        try:
            response = _generate(server_args)
        except requests.ConnectionError:  # the HTTP side is about to listen
            continue
        if response.status_code == requests.codes.ok:
            http_server.mark_up()
            return True
        if response.status_code != requests.codes.unavailable:
            logger.error("the warm-up request failed: %s", response.text)
            http_server.kill_process_tree(os.getpid())
            return False
        logger.warning("the MLP servers went away during the warm-up request; it is sent again")
    return False


def _generate(server_args: ServerArgs) -> requests.Response:
    prompt = {"input_ids": [10, 11, 12]} if server_args.skip_tokenizer_init else {"text": "Hello"}
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS}
    key = server_args.api_key
    return requests.post(
        server_args.url() + "/generate",
        json={**prompt, "sampling_params": sampling},
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=TIMEOUT_S,
        verify=server_args.ssl_verify(),
    )
