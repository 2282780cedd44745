#!/usr/bin/env bash
# Creates or updates .venv from constraints.txt, with the dependencies of tests, demo and benchmarks on a CPU.
# Usage: scripts/setup_env.sh [venv folder [constraints file [extras]]]; PYTHON=... selects the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv} constraints=${2:-constraints.txt} extras=${3:-cpu,test,bench}
oldest=10 # SGLang 0.5.10.post1 supports Python 3.10 to 3.13; 0.5.23, in the extra cpu13, needs 3.11
[[ ,$extras, == *,cpu13,* ]] && oldest=11

# Shared libraries of the transfer backends, and the Debian packages that contain them.
declare -A system_libs=(
    [libnuma.so.1]=libnuma1
    [libibverbs.so.1]=libibverbs1
    [librdmacm.so.1]=librdmacm1
    [liburing.so.2]=liburing2
    [libcurl.so.4]=libcurl4
)

say() { printf 'env: %s\n' "$*" >&2; }

runs() { command -v "$1" >/dev/null && "$@" >/dev/null 2>&1; } # a shim may exist and not run

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.12 python3.11 python3.10 python3.13 python3 python; do
        if runs "$candidate" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] < (3, 14))"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    say "no Python from 3.$oldest to 3.13 was found; install one, or name it: make env PYTHON=/path/to/python"
    exit 1
}

missing_packages() {
    local known lib
    known=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null) || return 0
    for lib in "${!system_libs[@]}"; do
        grep -qF "$lib " <<<"$known" || echo "${system_libs[$lib]}"
    done
}

install_packages() {
    [[ $# -eq 0 ]] && return
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        say "installing $*"
        if { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } >&2; then
            return
        fi
    fi
    say "system libraries are missing; Mooncake needs them to load: apt-get install $*"
}

make_venv() {
    [[ -x $venv/bin/python ]] && return
    local python
    python=$(find_python)
    say "creating $venv with $python"
    if runs uv --version; then
        uv venv --quiet --python "$python" "$venv"
    elif ! "$python" -m venv "$venv" >/dev/null; then
        rm -rf "$venv"
        install_packages "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
        "$python" -m venv "$venv"
    fi
}

install_python_packages() {
    local uv=(uv)
    if ! runs uv --version; then
        [[ -x $venv/bin/uv ]] || "$venv/bin/python" -m pip install --quiet uv
        uv=("$venv/bin/uv")
    fi
    "${uv[@]}" pip install --python "$venv/bin/python" --constraint "$constraints" --editable ".[$extras]"
}

# Tests run the alert rules with promtool and scrape a pair with prometheus, and are skipped without them. Only these
# programs of Debian's package are unpacked, because an installed package would start a server.
fetch_prometheus() {
    if [[ ,$extras, != *,bench,* || -x $venv/bin/prometheus ]] || runs prometheus --version; then return; fi
    local folder
    folder=$(mktemp -d)
    if command -v apt-get >/dev/null && (cd "$folder" && download prometheus && dpkg-deb -x prometheus_*.deb .) >&2; then
        mv "$folder/usr/bin/prometheus" "$folder/usr/bin/promtool" "$venv/bin/"
    else
        say "prometheus and promtool are missing; tests of metrics and alerts need them. Debian's package prometheus has both"
    fi
    rm -rf "$folder"
}

download() {
    timeout 60 apt-get download --quiet "$1" && return
    [[ $(id -u) -eq 0 ]] && timeout 120 apt-get update --quiet && timeout 60 apt-get download --quiet "$1"
}

mapfile -t packages < <(missing_packages)
install_packages "${packages[@]}"
make_venv
install_python_packages
fetch_prometheus
