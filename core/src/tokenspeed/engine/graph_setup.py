"""Which steps of one rank are captured as graphs, the memory to keep for them, and why there are none or fewer than could be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenspeed.config import EngineConfig
from tokenspeed.engine.memory import size_text
from tokenspeed.interfaces.attention import AttentionBackend
from tokenspeed.interfaces.platform import Platform
from tokenspeed.layers.moe import Experts
from tokenspeed.layers.recurrent import RecurrentLayer
from tokenspeed.runtime.executor import ModelExecutor
from tokenspeed.runtime.graphs import DecodeGraphs, capture_sizes
from tokenspeed.runtime.mixed_graphs import EXTEND_ROWS, MixedGraphs, mixed_sizes

__all__ = ["GraphPlan", "Graphs", "plan_graphs"]

_log = logging.getLogger(__name__)

#: What the driver keeps for one captured step of a deep model besides the step's own memory.
_BYTES_PER_GRAPH = 4 * 2**20

#: Workspaces of libraries for the stream of captures.
_BYTES_OF_STREAM = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """What to capture: decode steps of ``sizes`` rows, mixed steps of ``tokens`` prompt tokens beside ``rows`` decodes; all ascending.

    ``note`` says why that is nothing, or less than was asked for or could be; ``expected`` that the user asked for it.
    """

    sizes: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    note: str = ""
    expected: bool = False


def plan_graphs(
    config: EngineConfig,
    platform: Platform,
    decoders: Sequence[AttentionBackend],
    scans: Sequence[RecurrentLayer],
    *,
    decoder_name: str,
    max_rows: int,
    max_tokens: int,
    experts: Sequence[Experts] = (),
) -> GraphPlan:
    """Graphs for steps of at most ``max_rows`` rows and ``max_tokens`` tokens.

    Args:
        decoders: the decode backends, chosen as ``decoder_name``.
        scans: the model's recurrent layers; ``experts`` its layers of experts.
    """
    if not platform.supports_graphs:
        return GraphPlan()
    if config.enforce_eager:
        return GraphPlan(note="off (--enforce-eager)", expected=True)
    if not all(getattr(scan, "captures", False) for scan in scans):
        return GraphPlan(note="off: the model has recurrent layers, which cannot be captured")
    if not all(layer.captures for layer in experts):
        return GraphPlan(note="off: the kernel of the model's experts (moe.experts) cannot be captured")
    if not all(decoder.graph_variants for decoder in decoders):
        return GraphPlan(note=f"off: the decode steps of attention backend {decoder_name} cannot be captured")
    notes = []
    sizes = capture_sizes(max_rows, config.cudagraph_capture_sizes)
    if left_out := sorted(size for size in config.cudagraph_capture_sizes if size > max_rows):
        instead = "" if set(sizes) & set(config.cudagraph_capture_sizes) else ", and the platform's own are taken"
        listed = ", ".join(map(str, left_out))
        notes.append(f"--cudagraph-capture-sizes {listed} left out: a step has {max_rows} rows at most{instead}")
    tokens, rows = mixed_sizes(max_rows, max_tokens)
    if not all(getattr(scan, "captures_extend", False) for scan in scans):
        tokens, rows = (), ()
        notes.append("of decode steps alone: the model's recurrent layers read no prompts in a captured step")
    elif not all(decoder.captures_extend for decoder in decoders):
        tokens, rows = (), ()
        notes.append(f"of decode steps alone: attention backend {decoder_name} computes no prompts in a captured step")
    elif not tokens:
        rows = ()
        notes.append(f"of decode steps alone: a step of {max_tokens} tokens is smaller than any captured with prompts")
    return GraphPlan(sizes=sizes, tokens=tokens, rows=rows, note="; ".join(notes))


class Graphs:
    """The graphs of one rank: their buffers at once, the captures when the KV pool has its place.

    Args:
        make_decode, make_mixed: ``DecodeGraphs`` and ``MixedGraphs`` but for the sizes.
    """

    def __init__(
        self, plan: GraphPlan, make_decode: Callable[..., DecodeGraphs], make_mixed: Callable[..., MixedGraphs]
    ) -> None:
        self._plan = plan
        self._decode = make_decode(sizes=plan.sizes) if plan.sizes else None
        self._mixed = make_mixed(tokens=plan.tokens, rows=plan.rows) if plan.tokens else None
        if plan.note:
            level = logging.INFO if plan.expected or plan.sizes else logging.WARNING
            _log.log(level, "Captured graphs: %s", plan.note)

    def reserve_bytes(self, scratch: int, *, max_rows: int, max_tokens: int) -> int:
        """Memory to keep for the captures.

        A captured step takes the share of the largest step's ``scratch`` that it has of its tokens, or a quarter of that of its rows if that is more (it has
        logits, and draws nothing): once when it is run before the capture on a stream of its own, and once in the memory that all graphs share.
        """
        if self._decode is None:
            return 0
        tokens = max((self._plan.tokens or (0,))[-1] + EXTEND_ROWS + 1, self._plan.sizes[-1])
        share = min(1.0, max(tokens / max_tokens, self._plan.sizes[-1] / max_rows / 4))
        return int(2 * share * scratch) + _BYTES_OF_STREAM + self._estimate() * _BYTES_PER_GRAPH

    def _estimate(self) -> int:
        assert self._decode is not None, "there is something to capture"
        return self._decode.planned + (self._mixed.planned if self._mixed is not None else 0)

    def capture(self, platform: Platform, executor: ModelExecutor, *, reserved: int, utilization: float | None) -> str:
        """Capture everything and let ``executor`` replay it.

        Args:
            reserved: what was kept for it, in bytes.
            utilization: the share of the device that may be in use, where the KV pool was sized by it; more is a warning.

        Returns:
            For the start block: the graphs, their time and memory, and what ``GraphPlan.note`` says.
        """
        if self._decode is None:
            return self._plan.note
        before, began_s = platform.memory_use(), time.monotonic()
        with platform.allocate("graphs"):
            self._decode.capture(platform.capture_graph)
            if self._mixed is not None:
                self._mixed.capture(platform.capture_graph)
        executor.use_graphs(self._decode, self._mixed)
        count = self._decode.count + (self._mixed.count if self._mixed is not None else 0)
        text = f"{count} in {time.monotonic() - began_s:.1f} s, of 1 to {self._plan.sizes[-1]} rows"
        after = platform.memory_use()
        if before is not None and after is not None:
            took = max(0, before.free - after.free)
            text += f", {size_text(took)} ({size_text(reserved)} kept for them)"
            if took > reserved and utilization is not None and after.free < (1.0 - utilization) * after.total:
                _log.warning(
                    "Captured graphs took %s, %s more than was kept for them: more of the device is in use than --gpu-memory-utilization %g says; lower it, or "
                    "name fewer --cudagraph-capture-sizes",
                    size_text(took),
                    size_text(took - reserved),
                    utilization,
                )
        _log.info("Captured graphs: %s", text)
        return f"{text}; {self._plan.note}" if self._plan.note else text
