#!/usr/bin/env bash
# Installs a headless Chromium from Debian's packages, unless some Chromium is there already.
#
# Where that cannot be done it says so and succeeds: the tests that need a browser are skipped then, with
# a reason, and the others need none.
set -euo pipefail

for name in "${CHROMIUM:-chromium-headless-shell}" chromium-headless-shell chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then
        echo "$(command -v "$name") is there already"
        exit
    fi
done

give_up() {
    echo "No Chromium: $1. Install one, or set CHROMIUM=/path/to/chromium; without it the tests of the" \
        "status page are skipped." >&2
    exit 0
}

command -v apt-get >/dev/null || give_up "there is no apt-get"
sudo=()
if [[ $(id -u) != 0 ]]; then
    [[ -t 0 ]] && command -v sudo >/dev/null || give_up "apt-get needs root"
    sudo=(sudo)
fi
# Fonts, so that the pictures show what people see.
packages=(chromium-headless-shell fonts-dejavu-core)
"${sudo[@]}" apt-get update -q || give_up "apt-get update failed"
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends "${packages[@]}" || give_up "apt-get install failed"
