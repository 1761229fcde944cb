#!/usr/bin/env bash
# venv.sh FOLDER EXTRA: make the environment FOLDER, and install the package into it with
# the extra EXTRA ("all", "demo", "test" or "dev"), again when pyproject.toml is newer.
#
# PYTHON names the interpreter; an environment of another interpreter is made again.
# Without PYTHON an existing one is kept, and a new one gets the newest Python found.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
extra=$2
check='
import sys
assert sys.version_info >= (3, 11) and sys.version_info.releaselevel == "final"
import ensurepip, sqlite3, ssl, venv
print(sys.base_prefix, sys.version)'

fail() {
    echo "make: $1" >&2
    exit 1
}

# The commands that may be a Python, newest first. Each is tried before it is taken: one
# may be a shim without an interpreter, or lack a module that Debian packages apart.
candidates() {
    local minor
    for minor in {30..11}; do
        echo "python3.$minor"
        ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python3 2>/dev/null | sort -rV || true
    done
    echo python3
}

if [ -n "${PYTHON:-}" ]; then
    identity=$("$PYTHON" -c "$check" 2>/dev/null) ||
        fail "PYTHON=$PYTHON is not a Python 3.11 or newer with venv, ssl and sqlite3"

    if [ -x "$venv/bin/python" ] && [ "$("$venv/bin/python" -c "$check" 2>/dev/null)" != "$identity" ]; then
        echo "Removing $venv: it was not made with $PYTHON"
        rm -rf "$venv"
    fi
elif ! "$venv/bin/python" -c "$check" >/dev/null 2>&1; then
    while read -r command; do
        if "$command" -c "$check" >/dev/null 2>&1; then PYTHON=$command && break; fi
    done < <(candidates)

    [ -n "${PYTHON:-}" ] ||
        fail "no Python 3.11 or newer with venv, ssl and sqlite3 was found; install one (Debian: python3 and python3-venv) or name it: make PYTHON=/path/to/python3"
    rm -rf "$venv"
fi

# A stamp for each set of extras that is installed.
if [ "$venv/$extra" -nt pyproject.toml ]; then exit; fi
if [ ! -e "$venv" ]; then "$PYTHON" -m venv "$venv"; fi

# One line a package: the install takes minutes on a slow network.
echo "Installing cpkit[$extra] with $("$venv/bin/python" --version) into $venv"
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile \
    --editable ".[$extra]" --editable examples/custom_backend \
    --editable examples/mariadb_backend |
    awk '/^Collecting/ { sub(/[^A-Za-z0-9_.-].*/, "", $2); print "  " $2; fflush() }
         /^Installing/ { print "  unpacking (a minute)"; fflush() }' ||
    fail "the install into $venv failed; is there a network, and a wheel of each package for $("$venv/bin/python" --version)?"
# Here and not by pip, which compiles on one processor. A file that does not compile is
# one that nothing imports.
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true
touch "$venv/$extra"
