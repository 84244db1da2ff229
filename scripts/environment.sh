# Creates .venv with the pinned dependencies and puts it on the PATH. Sourced by the other scripts.
# Usage: . scripts/environment.sh [extra]      (extra: an optional dependency group of pyproject.toml)
# With KEEP_ENVIRONMENT=1, an existing .venv is used as it is.

make_environment() {
    local extra="${1:-}" python stamp
    python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: Python 3.11 or later is required; set PYTHON to its path" >&2
        return 2
    fi
    stamp=".venv/.installed${extra:+-$extra}"
    # Installs again only if pyproject.toml or constraints.txt has changed since.
    if [ "${KEEP_ENVIRONMENT:-}" = 1 ] && [ -x .venv/bin/python ]; then
        echo "== using .venv as it is" >&2
    elif [ ! -f "$stamp" ] || ! cat pyproject.toml constraints.txt | cmp -s - "$stamp"; then
        echo "== installing the pinned dependencies into .venv (a few minutes, once)" >&2
        [ -x .venv/bin/python ] || "$python" -m venv .venv
        # torch comes first and pinned: for a version range, pip would choose the newest and largest build.
        .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)"
        .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e ".${extra:+[$extra]}"
        cat pyproject.toml constraints.txt > "$stamp"
    fi
    # Limits busy waiting of OpenMP threads, which can slow a run down by a factor of ten on a machine that runs
    # other work too (docs/experiments.md).
    export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
    export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
}

make_environment "$@"
