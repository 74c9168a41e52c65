"""A headless Chromium over its debugging protocol: opens pages, asks them, takes screenshots."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
START_S = 60.0
# What it would otherwise look up on the network by itself.
QUIET = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
)


def find_browser() -> str | None:
    """The program that CHROMIUM names, or the first one of NAMES that is installed."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *NAMES))), None)


class Tab:
    """One page; `problems` has what its scripts threw, logged as errors or were refused."""

    def __init__(self, browser: Browser, session_id: str) -> None:
        self._browser = browser
        self._session_id = session_id
        self.problems: list[str] = []

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        """One command of the protocol to this page."""
        return await self._browser.send(method, params, self._session_id)

    async def look(self, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """How wide the window is, and which of light and dark its owner likes."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        """Go to an address; returns when the document is there."""
        answer = await self.send("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        await self.until("document.readyState === 'complete'")

    async def ask(self, expression: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        answer = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = START_S) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.ask(f"Boolean({expression})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.ask("document.body.innerText")
            raise AssertionError(f"never true: {expression}\n{self.problems}\n{text}") from None

    async def press(self, key: str) -> None:
        """One key, as from a keyboard."""
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **(text if kind == "keyDown" else {}),
            )

    async def type(self, text: str) -> None:
        """Text into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def picture(self, path: Path) -> None:
        """A screenshot of all of the page."""
        answer = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.problems.append(json.dumps(params["args"]))


class Browser:
    """A running Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}

    async def send(
        self, method: str, params: dict[str, object], session_id: str = ""
    ) -> dict[str, Any]:
        """One command; returns its result."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": session_id} if session_id else {}
        await self._socket.send_json({"id": number, "method": method, "params": params, **session})
        async with asyncio.timeout(START_S):
            return await answer

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """A page with no history, cookies or storage of another."""
        context = (await self.send("Target.createBrowserContext", {}))["browserContextId"]
        target = await self.send(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )
        attached = await self.send(
            "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
        )
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await tab.send(f"{domain}.enable")
        try:
            yield tab
        finally:
            await self.send("Target.disposeBrowserContext", {"browserContextId": context})

    async def read(self) -> None:
        """Hand out answers and events until the browser ends."""
        async for message in self._socket:
            said = json.loads(message.data)
            answer = self._answers.pop(said.get("id", 0), None)
            if answer is not None and "error" in said:
                answer.set_exception(RuntimeError(said["error"]["message"]))
            elif answer is not None:
                answer.set_result(said["result"])
            elif said.get("sessionId") in self._tabs:
                self._tabs[said["sessionId"]].on_event(said["method"], said["params"])


@asynccontextmanager
async def running(program: str) -> AsyncIterator[Browser]:
    """Start a Chromium with a profile of its own, and end it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *("--headless", "--disable-gpu", "--no-sandbox", "--hide-scrollbars", *QUIET),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            url = await _debugger_url(Path(profile) / "DevToolsActivePort", process)
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(url, max_msg_size=0) as socket,
            ):
                browser = Browser(socket)
                reader = asyncio.create_task(browser.read())
                yield browser
                reader.cancel()
        finally:
            # Debian's program is a script that waits for the browser, and dies without it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _debugger_url(port_file: Path, process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(START_S):
        while True:
            assert process.returncode is None, f"the browser ended with {process.returncode}"
            lines = port_file.read_text().splitlines() if port_file.exists() else []
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await asyncio.sleep(0.05)
