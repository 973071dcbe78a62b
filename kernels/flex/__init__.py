"""FlexAttention over a page table: tiles of query tokens, each with the pages that its row may read.

:mod:`~attnmux.kernels.flex.look` holds the mask and the score modification, :mod:`~attnmux.kernels.flex.tiles` cuts rows on the
host, :mod:`~attnmux.kernels.flex.step` turns tiles into tables, :mod:`~attnmux.kernels.flex.run` calls torch.
"""
