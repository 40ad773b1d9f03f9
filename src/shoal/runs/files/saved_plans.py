"""Plans in files, as JSON and StableHLO, without the loop that they were made from.

A file is a zip of `plan.json`, which describes the plan, and of the programs that it runs, as
`jax.export` serializes them. Reading one runs no Python from it: classes are those listed here,
and programs may call nothing outside XLA.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
from jax import export

from shoal.errors import CutError, SettingError, first_line
from shoal.graph import ir, layout
from shoal.planning import channel_specs, cluster, homes, plan, policy, program, segments, spread
from shoal.planning.fragment_program import write_program
from shoal.planning.plan import Plan
from shoal.runtime.execution.compiled_executor import key_data, wrapped
from shoal.runtime.execution.executors import make_spec
from shoal.runtime.execution.exporting import (
    PLATFORMS,
    ExportedFragment,
    ExportedSegment,
    Exporter,
    compile_for,
    export_fragment,
)
from shoal.runtime.execution.fragment import FragmentSpec
from shoal.runtime.execution.lowering import lowering_of

FORM = 2
MOST_BYTES, MOST_JSON_BYTES = 2**31, 2**26  # of a file, unpacked, and of its description
LEFT_OUT = ("code", "origin", "saved")  # fields that are about the loop's own Python
KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(ir.Graph, ir.Value, ir.Stage, ir.Glue, ir.Choice, ir.Agree, ir.Loop, ir.Carry, ir.Link),
        *(layout.Replicated, layout.Sharded, layout.Partial, layout.Varying, layout.Cause),
        *(layout.Findings, layout.Fault, spread.Spread, homes.Sites, plan.Plan),
        *(policy.DistributionPolicy, policy.Fragment, policy.Wire, policy.Lockstep),
        *(policy.Latest, policy.Queue, policy.Serve),
        *(cluster.Cluster, cluster.Host, cluster.Device, cluster.Place),
        *(program.Channel, program.Do, program.Call, program.Take, program.Put, program.Repeat),
        *(segments.Program, segments.Segment, segments.NumpyWork, segments.HostLoop),
        *(segments.Slice, segments.Buffer, segments.Stack, segments.Alias),
        *(channel_specs.ArraySpec, FragmentSpec, ExportedFragment, ExportedSegment),
    )
}
# What compiled code may call: XLA's own linear algebra and random bits, whose typed interface
# checks what it is given, and marks of shardings.
CALLS = re.compile(
    r"(lapack|cusolver|cublas|cu_threefry|hip_threefry|hipsolver|hipblas)\w*_ffi$|xla\.sdy\."
    r"|(Sharding|SPMD\w+|annotate_device_placement|Eigh|Qr|LuDecomposition|ApproxTopK"
    r"|ProductOfElementaryHouseholderReflectors)$"
)
CALLED = re.compile(r'(?:custom_call @|call_target_name = )(?:"([^"]*)"|([\w.$]+))')


@dataclass(frozen=True)
class SavedOrigin:
    """Where a loaded graph's first state comes from."""

    values: Mapping[str, ir.Value]
    inputs: tuple[str, ...]
    first: ExportedSegment

    def start(self, seed: int, envs: int) -> tuple[Any, ...]:
        """The state before the first tick."""
        leaves = compile_for(self.first, jax.devices()[0])(key_data(jax.random.key(seed)))
        specs = (self.values[name] for name in self.inputs)
        return tuple(
            wrapped(x) if s.dtype.startswith("key<") else x
            for x, s in zip(leaves, specs, strict=True)
        )

    def spec(self, envs: int) -> tuple[str, ...]:
        """A tree with one leaf for each carried value, in order."""
        return self.inputs


def save_plan(drawn: Plan, path: str | Path) -> Path:
    """Write a plan to a file that runs it, without the loop: see `load_plan`."""
    path, found = Path(path), _check_can_be_saved(drawn)
    kinds = (False, True) if any(map(found.one_program, _names(found))) else (False,)
    fragments = [
        (name, apart, _exported(found.over_processes if apart else found, name))
        for apart in kinds for name in _names(found)
    ]  # fmt: skip
    world = None if found.world is found.sites else found.world
    programs: list[bytes] = []
    data = {
        "form": FORM, "jax": jax.__version__, "first": _first_state(found), "plan": found,
        "spread": found.spread, "world": world, "fragments": fragments,
    }  # fmt: skip
    text = json.dumps(_as_data(data, programs))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("plan.json", text)
        for number, code in enumerate(programs):
            file.writestr(f"programs/{number}", code)
        file.writestr("digest", digest(text.encode(), *programs))
    return path


def load_plan(path: str | Path) -> Plan:
    """The plan of a file that `save_plan` wrote, ready for `run`."""
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as file:
            if sum(one.file_size for one in file.infolist()) > MOST_BYTES:
                raise ValueError(f"it holds more than {MOST_BYTES} bytes")
            if file.getinfo("plan.json").file_size > MOST_JSON_BYTES:
                raise ValueError(f"its plan.json holds more than {MOST_JSON_BYTES} bytes")
            data = json.loads(file.read("plan.json"))
            form = dict(data["map"])["form"]
            if form != FORM:
                raise ValueError(f"it has form {form}, and this Shoal reads form {FORM}")
            names = [n for n in file.namelist() if n.startswith("programs/")]
            parts = (file.read(n) for n in ("plan.json", *sorted(names, key=_number)))
            if digest(*parts) != file.read("digest").decode():
                raise ValueError("it was changed after it was saved")
            return _whole(_from_data(data, lambda number: file.read(f"programs/{number}")))
    except OSError as error:
        raise SettingError(f"{path} can't be read: {error}", "Name a file of --save.") from error
    except Exception as error:  # what a file holds may be wrong in any way
        raise SettingError(
            f"{path} holds no plan that can run here: {type(error).__name__}: {first_line(error)}",
            "Save it again with `shoal plan --save`.",
        ) from error


def digest(*parts: bytes) -> str:
    """A checksum of a file's parts: a plan that was altered fails here, not while it runs."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8) + part)
    return found.hexdigest()


def _number(name: str) -> int:
    return int(name.rpartition("/")[2])


def _names(found: Plan) -> list[str]:
    return [fragment.name for fragment in found.distribution.fragments]


def _check_can_be_saved(found: Plan) -> Plan:
    if stage := next((s for s in found.graph.stages if s.host), None):
        raise CutError(
            f"a plan with host stages can't be saved: `{stage.stage}` is Python, which a file of "
            "a plan doesn't hold",
            "Use an environment that XLA compiles, or train with `shoal train`.",
            stage.source,
        )
    for name in _names(found):
        if not found.saved and lowering_of(found, name).mesh is not None:
            raise CutError(
                f"a plan whose replicas share a program over several devices can't be saved: "
                f"`{name}`",
                "Save it for a cluster with one device.",
            )
    return found


def _exported(found: Plan, fragment: str) -> ExportedFragment:
    """A fragment's programs; of a plan of one program, also its ticks."""
    written = write_program(found, fragment)
    spec = make_spec(found, written)
    exported = export_fragment(found, spec)
    is_one = len(_names(found)) == 1 and spec.ends == 1 and written.compiles_whole
    if is_one and exported.ticks is None:
        ticks = Exporter(found, spec, lowering_of(found, fragment)).ticks()
        exported = replace(exported, ticks=ticks)
    codes = [*(s.stablehlo for s in exported.segments.values())]
    for code in codes + ([exported.ticks.stablehlo] if exported.ticks else []):
        _check_calls(code)
    return exported


def _first_state(found: Plan) -> ExportedSegment:
    """The loop's first state as a function of a key's data."""
    graph = found.graph
    if isinstance(graph.origin, SavedOrigin):
        return graph.origin.first

    def first(raw: jax.Array) -> list[Any]:
        origin, key = graph.origin, wrapped(raw)
        return [
            key_data(x) for x in jax.tree.leaves(origin.algorithm.init(key, origin.env, graph.envs))
        ]

    kinds = dict.fromkeys(p.device.kind for places in found.places.values() for p in places)
    platforms = [PLATFORMS.get(kind, kind) for kind in kinds]
    key = jax.ShapeDtypeStruct((channel_specs.KEY_WORDS,), "uint32")
    exported = export.export(jax.jit(first), platforms=platforms)(key)
    return ExportedSegment(bytes(exported.serialize()))


def _check_calls(code: bytes) -> bytes:
    """Return a program if it calls nothing outside XLA, else raise."""
    text = export.deserialize(bytearray(code)).mlir_module()
    for quoted, plain in CALLED.findall(text):
        if not CALLS.match(quoted or plain):
            raise CutError(
                f"a program of this plan calls `{quoted or plain}`, which is not part of XLA",
                "Run the loop itself, with `shoal train`.",
            )
    return code


def _as_data(x: Any, programs: list[bytes]) -> Any:
    """`x` as JSON; its programs are appended to `programs`."""

    def data(x: Any) -> Any:
        if x is None or isinstance(x, bool | int | float | str):
            return x
        if isinstance(x, bytes):
            programs.append(x)
            return {"program": len(programs) - 1}
        if isinstance(x, range):
            return {"range": [x.start, x.stop, x.step]}
        if isinstance(x, Mapping):
            return {"map": [[data(k), data(v)] for k, v in x.items()]}
        if isinstance(x, tuple | list | frozenset):
            return {type(x).__name__: [data(y) for y in (sorted(x) if type(x) is frozenset else x)]}
        assert KINDS[type(x).__name__] is type(x), x
        held = {f.name: getattr(x, f.name) for f in fields(x) if f.name not in LEFT_OUT}
        return {"is": type(x).__name__, "with": {name: data(y) for name, y in held.items()}}

    return data(x)


def _from_data(data: Any, program_of: Callable[[int], bytes]) -> Any:
    """The inverse of `_as_data`."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "tuple": lambda items: tuple(map(made, items)),
        "list": lambda items: list(map(made, items)),
        "frozenset": lambda items: frozenset(map(made, items)),
        "range": lambda bounds: range(*bounds),
        "map": lambda pairs: {made(key): made(value) for key, value in pairs},
        "program": lambda number: _check_calls(program_of(int(number))),
    }

    def made(x: Any) -> Any:
        if not isinstance(x, dict):
            return x
        if "is" in x:
            return KINDS[x["is"]](**{name: made(y) for name, y in x["with"].items()})
        ((kind, held),) = x.items()
        return kinds[kind](held)

    return made(data)


def _whole(data: Mapping[str, Any]) -> Plan:
    """The plan as it was before it was saved, without its loop."""
    found: Plan = data["plan"]
    graph = found.graph
    origin = SavedOrigin(graph.values, graph.inputs, data["first"])
    sites = replace(found.sites, graph=replace(graph, origin=origin))
    fragments = {(name, apart): one for name, apart, one in data["fragments"]}
    # Where replicas run alike together and apart, there is one program for both.
    both = {(name, apart): fragments.get((name, apart), fragments[name, False])
            for name in _names(found) for apart in (False, True)}  # fmt: skip
    whole = replace(found, sites=sites, saved=both)
    for one in (whole, whole.over_processes):
        one.__dict__["spread"] = data["spread"]
        one.__dict__["world"] = data["world"] or sites
    return whole
