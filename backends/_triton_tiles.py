"""Which tile the rows of a step take, and how much room a launch needs: by what the spec, the device and the limits say."""

from __future__ import annotations

from torch import Tensor

from attnmux.backends._triton_step import Room, room_for
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.spec import MAX_DECODE_TOKENS, AttentionSpec, Limits
from attnmux.kernels.triton.config import LaunchConfig, Target, launch_config

INVARIANT_CUT_KEYS = 2048
"""Keys a part has in decode under ``batch_invariant``."""
WHOLE = 1 << 30
"""More tiles than a row has."""
MOST_TOKENS = 2**31 - 1


class Tiles:
    """A step has at most two launches: ``decode`` for rows of few query tokens, and ``prefill`` for the others, or in its place ``long``, where
    tiles of more queries were found to be faster and those rows fill the device with them.

    Args:
        multiprocessors: of the device.
        programs: how many the device holds at once, where the user says so.
    """

    def __init__(self, spec: AttentionSpec, device: Device, multiprocessors: int, programs: int | None) -> None:
        self.spec = spec
        self._multiprocessors, self._programs = multiprocessors, programs
        self._target = Target(device.type, device.arch, device.shared_memory, "tma" in device.features)
        self._configs: dict[tuple[str, int], LaunchConfig] = {}
        self._few = 0 if spec.attn_type == "encoder_only" else MAX_DECODE_TOKENS
        more = (self._few + 1, MOST_TOKENS)
        self.lengths = {"decode": (1, self._few), "prefill": more, "long": more}
        """Least and most query tokens of the rows that each is for: the class of a row, which a captured graph keeps."""
        self.most_prefill_tokens = self._most_prefill_tokens()
        """Query tokens of a step's rows beyond which ``long`` takes the place of ``prefill``."""

    def _most_prefill_tokens(self) -> int:
        """As many as the larger tiles cut into half again as many Q blocks as the device holds at once: with fewer, smaller tiles end sooner."""
        if self.spec.batch_invariant:  # the tile of a row must not depend on its neighbours
            return MOST_TOKENS
        long = self.config("long", MOST_TOKENS)
        if long == self.config("prefill", MOST_TOKENS):
            return MOST_TOKENS
        return 3 * self.programs(long) * long.block_m // (2 * self.spec.num_q_heads)

    def kinds(self, batch: Batch) -> dict[str, int]:
        """The launches of a step, each with its longest row."""
        top = batch.longest_query
        if top <= self._few:
            return {"decode": top} if top > 0 else {}
        tokens = sum(n for n in batch.query_lens if n > self._few)
        few = max((n for n in batch.query_lens if n <= self._few), default=0)
        return {"long" if tokens > self.most_prefill_tokens else "prefill": top} | ({"decode": few} if few else {})

    def reachable(self, limits: Limits) -> dict[tuple[str, LaunchConfig], int]:
        """Every launch that batches within the limits can need, with the query tokens of a row for which it is made."""
        longest = min(limits.max_query_len, limits.max_num_tokens)
        if self.spec.attn_type != "cross":
            longest = min(longest, limits.max_seq_len)
        found = {("decode", self.config("decode", n)): n for n in range(1, min(longest, self._few) + 1)}
        if longest > self._few:
            if self.most_prefill_tokens > self._few:
                found["prefill", self.config("prefill", longest)] = self._few + 1
            if min(limits.max_num_tokens, limits.max_num_seqs * longest) > self.most_prefill_tokens:
                found["long", self.config("long", longest)] = self._few + 1
        return found

    def config(self, kind: str, max_query_len: int) -> LaunchConfig:
        """The tile of a launch whose longest row has so many query tokens."""
        spec = self.spec
        # longer rows are all alike, and the tile of an invariant row must not depend on its neighbours
        max_query_len = MAX_DECODE_TOKENS if spec.batch_invariant else min(max_query_len, MAX_DECODE_TOKENS + 1)
        found = self._configs.get((kind, max_query_len))
        if found is None:
            sizes = (spec.group, spec.head_size, spec.v_head_size, spec.dtype.itemsize, spec.kv_dtype.itemsize, spec.page_size or 0)
            found = launch_config(self._target, kind, max_query_len, *sizes)
            if found is None:
                raise ValueError(complaint("head_size", spec.head_size, f"a tile that fits {self._target.shared_memory} bytes of shared memory"))
            self._configs[kind, max_query_len] = found
        return found

    def programs(self, config: LaunchConfig) -> int:
        """How many the device holds at once."""
        return self._programs or config.programs * self._multiprocessors

    def room(self, kind: str, config: LaunchConfig, limits: Limits | None, batch: Batch) -> Room:
        """Room for the rows of a kind in a batch, or in every batch within the limits."""
        if limits is not None:
            return self.room_within(kind, config, limits)
        block_q = config.block_m // self.spec.group
        least, most = self.lengths[kind]
        return self._room(kind, config, sum(-(-n // block_q) for n in batch.query_lens if least <= n <= most), batch.longest_keys)

    def room_within(self, kind: str, config: LaunchConfig, limits: Limits) -> Room:
        """Room for the rows of a kind in every batch within the limits."""
        block_q, seqs = config.block_m // self.spec.group, limits.max_num_seqs
        longest = min(limits.max_query_len, self.lengths[kind][1])
        return self._room(kind, config, min(seqs * -(-longest // block_q), seqs + limits.max_num_tokens // block_q), limits.max_seq_len)

    def _room(self, kind: str, config: LaunchConfig, blocks: int, keys: int) -> Room:
        """Room for so many Q blocks that see at most so many keys."""
        cut = 0
        if self.spec.batch_invariant:
            cut = max(1, INVARIANT_CUT_KEYS // config.block_n) if kind == "decode" else WHOLE
        return room_for(blocks, -(-keys // config.block_n), self.programs(config), self.spec.num_kv_heads, cut)

    def slot_floats(self, slots: int, config: LaunchConfig) -> int:
        """Floats that so many partial states take."""
        return slots * self.spec.num_kv_heads * config.block_m * (self.spec.v_head_size + 1)

    def slots(self, slots: int, config: LaunchConfig, room: Tensor) -> tuple[Tensor, Tensor]:
        """Partial outputs and their LSEs, in so many floats."""
        shape = (slots, self.spec.num_kv_heads, config.block_m)
        lses = shape[0] * shape[1] * shape[2]
        return room[lses:].view(*shape, self.spec.v_head_size), room[:lses].view(shape)
