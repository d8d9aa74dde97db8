"""``python -m solrl`` is ``solrl``."""

from solrl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
