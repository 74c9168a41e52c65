#!/bin/sh
# Run the small exchanges under one tool of compute-sanitizer: run_sanitizer.sh memcheck|racecheck
# [--fault]. Ends with 9 where the tool found something. PYTHON and COMPUTE_SANITIZER say which
# programs, SANITIZER_FILTER which kernels ("" takes all).
set -eu
tool=$1
shift
here=$(dirname "$0")
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
case $("$sanitizer" --help 2>&1 || true) in
    *--kernel-regex*) filter="--kernel-regex kns=afd_" ;;
    *--kernel-name*) filter="--kernel-name kns=afd_" ;;
    *) filter="--filter kns=afd_" ;;
esac
# Every tensor gets memory of its own, so that the first byte behind it is out of bounds; the tools
# do not go together with MPS.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 CUDA_MPS_PIPE_DIRECTORY=/dev/null
export PYTHONPATH="$here/../..:$here/../support${PYTHONPATH:+:$PYTHONPATH}"
# shellcheck disable=SC2086
exec "$sanitizer" --tool "$tool" ${SANITIZER_FILTER-$filter} --error-exitcode 9 \
    --target-processes application-only --report-api-errors no \
    "${PYTHON:-python3}" "$here/sanitized_exchange.py" "$@"
