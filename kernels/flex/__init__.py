"""FlexAttention over a page table: tiles of query tokens, each with the pages that its row may read.

:mod:`~attnmux.kernels.flex.look` holds the mask and the score modification, :mod:`~attnmux.kernels.flex.tiles` cuts rows on the
host, :mod:`~attnmux.kernels.flex.step` turns tiles into tables, :mod:`~attnmux.kernels.flex.run` calls torch.

A tile is a batch entry of FlexAttention: 16 or 128 query tokens of one row, so it reads no page of another row and no number in
it. The pool is one run of keys, a page one KV block of the block mask, and a table a row says where a page stands in it. What
torch 2.13 does, and what follows:

- Its Triton kernel skips blocks that it is not given, but multiplies all keys of the others: 0 times NaN is NaN. The last page of
  a row, where its keys do not fill it, is therefore copied, with zeros behind them, and merged by log-sum-exp.
- Its own tile of keys may be larger than a page, and its kernel for short queries takes group sizes that are powers of two:
  :func:`~attnmux.kernels.flex.run.kernel_options` fixes the other one, with tiles that divide a page.
- Offsets are 32-bit, guarded: a pool of 2**31 elements and more compiles once again, with 64-bit ones.
- On a CPU, compiled, it returns no log-sum-exp, and its C++ for tables of changing sizes is not valid; not compiled, it
  multiplies every key it is given. There the step's keys are copied, a row at a time.

In place a row can hold a page once only: at one place in the pool there is one position.
"""
