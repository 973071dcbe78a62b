"""``python -m attnmux``."""

from attnmux.dispatch.cli import main

raise SystemExit(main())
