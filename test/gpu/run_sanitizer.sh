#!/bin/sh
# Run the small exchanges under one tool of compute-sanitizer: run_sanitizer.sh memcheck|racecheck
# [--fault read|race]. Ends with 9 where the tool found something and the program ended well. PYTHON
# and COMPUTE_SANITIZER say which programs, SANITIZER_FILTER which kernels ("" takes all).
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
# Every tensor gets memory of its own with room behind it, so that the first byte beyond is out of
# bounds; CUDA would put the next tensor there. The tools do not go together with MPS.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 CUDA_MPS_PIPE_DIRECTORY=/dev/null
padding=
[ "$tool" != memcheck ] || padding="--padding 4096"
export PYTHONPATH="$here/../..:$here/../support${PYTHONPATH:+:$PYTHONPATH}"
# The import of torch alone may take longer than the ten seconds in which CUDA is expected to begin.
# shellcheck disable=SC2086
exec "$sanitizer" --tool "$tool" $padding ${SANITIZER_FILTER-$filter} --error-exitcode 9 \
    --launch-timeout 120 --target-processes application-only --report-api-errors no \
    "${PYTHON:-python3}" "$here/sanitized_exchange.py" "$@"
