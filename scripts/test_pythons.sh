#!/usr/bin/env bash
# Tests attachment, and runs the package's unit tests that need neither torch nor SGLang, on each Python version in
# pyproject.toml: a wheel of this tree in a separate environment, .venv-VERSION.
# Usage: scripts/test_pythons.sh [VERSION ...]. A version that cannot be installed is skipped with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH SGLANG_PATCHSET SGLANG_PATCHSET_DISABLE

versions=("$@")
if [[ $# -eq 0 ]]; then
    mapfile -t versions < <(sed -nE 's/.*"Programming Language :: Python :: (3\.[0-9]+)".*/\1/p' pyproject.toml)
fi
uv=$(command -v uv) || { echo "uv is needed: pip install uv" >&2; exit 1; }
for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin; do
    PATH=$PATH:$folder # uv finds installed versions, and downloads the others
done
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# Dependencies of the tests, and of a build of the wheel.
libraries=(aiohttp build hatchling hypothesis msgspec numpy packaging prometheus-client pytest pytest-timeout pyzmq requests
    typing-extensions)
# Tests of benchmarks, documents, models and the runs themselves.
others=(agentic_\* chaos documents harness kv_transfer\* models traces test_\*.py)

make_environment() { # VERSION FOLDER
    "$uv" venv --quiet --clear --python "$1" "$2" &&
        "$uv" pip install --quiet --python "$2/bin/python" --constraint constraints.txt "${libraries[@]}" &&
        "$uv" pip install --quiet --python "$2/bin/python" --no-deps .
}

failed=0
for version in "${versions[@]}"; do
    venv=.venv-$version
    if ! make_environment "$version" "$venv" >"$logs/$version" 2>&1; then
        printf 'Python %s: SKIPPED, %s\n' "$version" "$(tr '\n' ' ' <"$logs/$version")"
        continue
    fi
    printf 'Python %s: %s\n' "$version" "$("$venv/bin/python" -VV)"
    # The first tests attach the installed wheel to a miniature SGLang.
    "$venv/bin/python" -m pytest --quiet -p no:cacheprovider -r fE test/srt/unit/patchset || failed=1
    "$venv/bin/python" -m pytest --quiet -p no:cacheprovider -r fE --fast test/srt/unit \
        "${others[@]/#/--ignore-glob=*/unit/}" || failed=1
done
exit $failed
