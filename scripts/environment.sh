# Sourced by the other scripts: makes .venv with the pinned dependencies, once, and puts it on the path.
# Usage: . scripts/environment.sh [extra]      (extra: an optional dependency group of pyproject.toml)

make_environment() {
    local extra="${1:-}" python stamp
    python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: Python 3.11 or newer is needed; set PYTHON to its command" >&2
        return 2
    fi
    stamp=".venv/.installed${extra:+-$extra}"
    # The stamp holds what it was made from: changed pins install again, unchanged ones cost nothing.
    if [ ! -f "$stamp" ] || ! cat pyproject.toml constraints.txt | cmp -s - "$stamp"; then
        echo "== installing the pinned dependencies into .venv (a few minutes, once)" >&2
        [ -x .venv/bin/python ] || "$python" -m venv .venv
        # torch first and pinned: asked for by a range, the registry would choose its newest and largest build.
        .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)"
        .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e ".${extra:+[$extra]}"
        cat pyproject.toml constraints.txt > "$stamp"
    fi
    # OpenMP threads wait busily for each other, which can collapse on a machine that does other work too;
    # giving way sooner cost nothing visible on a quiet one (docs/experiments.md).
    export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
    export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
}

make_environment "$@"
