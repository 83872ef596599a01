"""What the config of every family has: widths, heads, the order of its layers, and the sites that they round."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from trace_jax.errors import UserError
from trace_jax.layers.rope import RopeScaling

ConfigT = TypeVar("ConfigT", bound="DecoderConfig")

DENSE = "dense"
"""Kind of a layer whose feed-forward network is one network, not a mixture."""

EXPERTS = "experts"
"""Kind of a layer with routed experts; families with several kinds of attention name further ones."""


class LayerGroup(NamedTuple):
    """Layers that one scan runs: a pattern of layer kinds, and how often it is repeated."""

    kinds: tuple[str, ...]
    count: int


class Stack(NamedTuple):
    """The layers of one place in a group's pattern, whose parameters are stacked along axis 0.

    Args:
      path: keys from the root of the parameters.
      kind: of these layers.
      layer_ids: global decoder layer ids, ascending, at equal distances.
    """

    path: tuple[str | int, ...]
    kind: str
    layer_ids: tuple[int, ...]

    def only(self, index: int) -> Stack:
        """The layer at an index as a stack of one."""
        return Stack(self.path, self.kind, (self.layer_ids[index],))


class Site(NamedTuple):
    """An activation site: the layers that have it, the axes between token and width, and the width along which blocks run."""

    layer_ids: tuple[int, ...]
    lead: tuple[int, ...]
    width: int


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Hyper-parameters that every family has; hashable, so it can be a static argument under `jax.jit`.

    Args:
      vocab_size: V, rows of the embedding.
      hidden_size: D, width of the residual stream.
      num_layers: L, decoder layers.
      num_heads: H, query heads.
      num_kv_heads: K, key and value heads; divides `num_heads`.
      head_dim: width of one head; even (rotary pairs).
      rope_theta: base of the rotary angles.
      rms_norm_eps: epsilon of every RMS norm.
      tie_embeddings: whether the output head is the embedding matrix.
      max_position: context length in tokens.
      num_experts: E; 0 for a dense family.
      experts_per_token: k, experts that process a token; 0 for a dense family.
      expert_hidden_size: F, hidden width of one expert; 0 for a dense family.

    Raises:
      UserError: a value is too small, or the head counts do not divide.
    """

    FAMILY: ClassVar[str]
    MODEL_TYPE: ClassVar[str] = ""
    """`model_type` of Hugging Face configs, where it is not the family's name."""

    NORM_OFFSET: ClassVar[float] = 0.0
    """What is added to the weights of norms: 1 where the files hold their distance from 1."""

    CACHE_REASON: ClassVar[str] = ""
    """Why the cache of a family without sites `k` and `v` cannot be rounded, as the end of a sentence that begins with the family."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_position: int = 4096
    num_experts: int = field(default=0, init=False)
    experts_per_token: int = field(default=0, init=False)
    expert_hidden_size: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for entry in _given(type(self)):
            value, least = getattr(self, entry.name), entry.metadata.get("least")
            if least is not None and value < least:
                raise UserError(f"model.config.{entry.name} is {value}; it must be at least {least}")
            if least is None and entry.type in ("int", "float") and not value > 0:
                raise UserError(f"model.config.{entry.name} is {value}; it must be greater than 0")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"model.config.num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise UserError(f"model.config.head_dim={self.head_dim} must be even: rotary embedding turns pairs")

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers in order, as repeated patterns."""
        return (LayerGroup((EXPERTS if self.num_experts else DENSE,), self.num_layers),)

    def sites_of(self, kind: str) -> tuple[str, ...]:
        """Names of the sites that a layer of this kind rounds."""
        return ("k", "v") if kind == DENSE else ("expert_input", "down_input", "k", "v")

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacked layers, in the order of the parameter tree."""
        return _stacks(self.groups)

    @property
    def sites(self) -> dict[str, Site]:
        """Every site that some layer of the model rounds."""
        return _sites(self)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers with routed experts."""
        return self.layers_of("expert_input")

    @property
    def cache_layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers that the decode cache has a place for."""
        return self.layers_of("k")

    @property
    def recurrent_layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers of linear attention."""
        return ()

    @property
    def recurrent_shape(self) -> tuple[int, int, int, int, int]:
        """Of one sequence in one such layer: heads, widths of a key and of a value, earlier inputs of the convolution, its channels."""
        raise ValueError(f"{self.FAMILY} has no layers of linear attention")

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Of one token in one layer of the cache: heads, width of a head's key, width of its value."""
        return self.num_kv_heads, self.head_dim, self.head_dim

    def layers_of(self, site: str) -> tuple[int, ...]:
        """Global ids of the layers that have a site; none where the model does not have it."""
        found = self.sites.get(site)
        return () if found is None else found.layer_ids

    def site_shape(self, name: str) -> tuple[tuple[int, ...], int]:
        """Leading axes and width of a site."""
        return {
            "expert_input": ((), self.hidden_size),
            "down_input": ((), self.expert_hidden_size),
            "k": ((self.num_kv_heads,), self.head_dim),
            "v": ((self.num_kv_heads,), self.head_dim),
        }[name]

    @classmethod
    def from_dict(cls: type[ConfigT], values: dict[str, Any]) -> ConfigT:
        """Builds a config from a plain mapping with this class's field names.

        Raises:
          UserError: an unknown or missing field, or a value of the wrong type.
        """
        known = {entry.name: entry for entry in _given(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise UserError(f"model.config.{unknown[0]} is not a field of {cls.FAMILY}; fields: {', '.join(sorted(known))}")
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in values]
        if missing:
            raise UserError(f"model.config.{missing[0]} is missing; {cls.FAMILY} needs {', '.join(missing)}")
        return cls(**{name: _converted(name, str(known[name].type), value) for name, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain mapping; `from_dict` inverts it."""
        names = {entry.name for entry in _given(type(self))}
        return {name: value for name, value in dataclasses.asdict(self).items() if name in names}


@dataclass(frozen=True, kw_only=True)
class MoeConfig(DecoderConfig):
    """A decoder with routed experts in some or all layers.

    Raises:
      UserError: also if a token takes more experts than there are.
    """

    num_experts: int = field()
    experts_per_token: int = field()
    expert_hidden_size: int = field()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token > self.num_experts:
            raise UserError(f"model.config.experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")


def places(ids: tuple[int, ...], among: tuple[int, ...]) -> slice:
    """Where the ids of a stack stand among other ids, as a slice: a pattern repeats at equal distances.

    Raises ValueError if they are not all there, or not at equal distances.
    """
    found = [among.index(layer) for layer in ids]
    step = found[1] - found[0] if len(found) > 1 else 1
    if np.any(np.diff(found) != step):
        raise ValueError(f"layers {ids} stand at {found}, not at equal distances")
    return slice(found[0], found[-1] + 1, step)


def dense_first(config: DecoderConfig, dense_layers: int) -> tuple[LayerGroup, ...]:
    """Groups of a decoder whose first layers have no experts."""
    counts = ((DENSE, dense_layers), (EXPERTS, config.num_layers - dense_layers))
    return tuple(LayerGroup((kind,), count) for kind, count in counts if count)


@functools.cache
def _given(cls: type[DecoderConfig]) -> tuple[dataclasses.Field, ...]:
    return tuple(entry for entry in fields(cls) if entry.init)


@functools.cache
def _stacks(groups: tuple[LayerGroup, ...]) -> tuple[Stack, ...]:
    stacks, first = [], 0
    for number, group in enumerate(groups):
        size = len(group.kinds)
        for place, kind in enumerate(group.kinds):
            path = ("groups", number) if size == 1 else ("groups", number, place)
            stacks.append(Stack(path, kind, tuple(range(first + place, first + size * group.count, size))))
        first += size * group.count
    return tuple(stacks)


@functools.cache
def _sites(config: DecoderConfig) -> dict[str, Site]:
    layers: dict[str, list[int]] = {}
    for stack in config.stacks:
        for name in config.sites_of(stack.kind):
            layers.setdefault(name, []).extend(stack.layer_ids)
    return {name: Site(tuple(sorted(ids)), *config.site_shape(name)) for name, ids in layers.items()}


def _converted(name: str, declared: str, value: Any) -> Any:
    if declared == "RopeScaling | None":
        return RopeScaling.from_dict(value) if isinstance(value, dict) else value
    kind = {"int": int, "float": (int, float), "bool": bool}[declared]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"model.config.{name} is {value!r}; it must be of type {declared}")
    return float(value) if declared == "float" else value
