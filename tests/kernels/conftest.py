"""The tests in ``triton/`` run Triton kernels, so Triton must know before it is imported whether to interpret them.

``test_triton.py`` runs them in processes of their own, interpreted; ``tests/gpu`` runs them natively. By hand:
``TRITON_INTERPRET=1 pytest tests/kernels/triton``, or 0 on a machine with a GPU.
"""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") in ("0", "1") else ["triton"]
