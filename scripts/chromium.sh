#!/bin/sh
# Prints the path of a Chromium or Chrome; installs Debian's where there is none and we may.
set -eu

find_chromium() {
    for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable \
        "/Applications/Chromium.app/Contents/MacOS/Chromium" \
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; do
        [ -n "$name" ] && command -v "$name" && return
    done
    return 1
}

find_chromium && exit

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "mpkit: installing Debian's chromium for the browser tests" >&2
    export DEBIAN_FRONTEND=noninteractive
    if log=$({ apt-get update -qq && apt-get install -y -qq chromium fonts-dejavu-core; } 2>&1 </dev/null) &&
        find_chromium; then
        exit
    fi
    printf '%s\n' "$log" | tail -n 15 >&2
fi

cat >&2 <<'MESSAGE'
mpkit: the browser tests need Chromium or Chrome, and none was found. Either
  install it:  sudo apt-get install chromium    (Debian; elsewhere by its own package manager)
  or name it:  make test-browser CHROMIUM=/path/to/chrome
MESSAGE
exit 1
