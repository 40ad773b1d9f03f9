"""The time of a device is given to the outermost stage that an operation comes from."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from shoal.profiling.device import (
    Operation,
    busy_nanoseconds,
    own_durations,
    stage_of,
    stages_of_operations,
)

PROGRAM = """
ENTRY %main (a: f32[4]) -> f32[4] {
  %fusion.1 = f32[4]{0} fusion(%a), metadata={op_name="jit(ticks)/while/body/jit(act/vmap()/tanh"}
  %dot.3 = f32[4]{0} dot(%a), metadata={op_name="jit(ticks)/while/body/jit(learn/jit(act/dot"}
  ROOT %while.2 = f32[4]{0} while(%a), metadata={op_name="jit(ticks)/while" stack_frame_id=3}
  %copy.1 = f32[4]{0} copy(%a)
}
"""


@dataclass
class Event:
    start_ns: float
    duration_ns: float
    stats: list


@dataclass
class Line:
    events: list
    name: str = ""


@dataclass
class Plane:
    name: str
    lines: list


@dataclass
class Profile:
    planes: list = field(default_factory=list)


def event(name, start, duration):
    return Event(start, duration, [("hlo_op", name), ("hlo_module", "jit_ticks")])


def test_an_operation_is_of_the_outermost_stage_of_its_path():
    stages = {"act", "learn"}
    assert stages_of_operations(PROGRAM, stages) == {
        "fusion.1": "act", "dot.3": "learn", "while.2": "",
    }  # fmt: skip
    assert stage_of("jit(ticks)/transpose(jvp(jit(learn))/mul", stages) == "learn"
    assert stage_of("jit(actor)/mul", stages) == ""


def test_operations_of_other_programs_and_events_without_any_are_left_out():
    events = [event("fusion.1", 0, 5), event("other.9", 5, 50), Event(60, 9, [])]
    profile = Profile([Plane("/host:CPU", [Line(events), Line([event("dot.3", 2, 7)])])])
    stages = {"fusion.1": "act", "dot.3": "learn"}
    assert busy_nanoseconds(profile, stages) == {"act": 5, "learn": 7}


def test_of_a_gpu_its_streams_count_and_the_host_does_not():
    lines = [Line([event("dot.3", 0, 4)], "Stream #13"), Line([event("dot.3", 0, 4)], "XLA Ops")]
    host = Plane("/host:CPU", [Line([event("dot.3", 0, 90)])])
    profile = Profile([host, Plane("/device:GPU:0", lines)])
    assert busy_nanoseconds(profile, {"dot.3": "learn"}) == {"learn": 4}


@st.composite
def nested(draw, depth=0):
    """Operations of one thread: each begins after the one before, or is inside of one."""
    found, at = [], 0
    for _ in range(draw(st.integers(0, 3))):
        at += draw(st.integers(0, 9))
        inside = draw(nested(depth + 1)) if depth < 3 else []
        length = max([o.start + o.duration for o in inside], default=0) + draw(st.integers(1, 9))
        found.append(Operation(f"{depth}", at, length))
        found += [Operation(o.name, at + o.start, o.duration) for o in inside]
        at += length
    return found


@given(nested())
def test_own_durations_are_all_of_the_time_in_which_anything_runs(operations):
    top = sum(o.duration for o in operations if o.name == "0")
    assert sum(duration for _, duration in own_durations(operations)) == top
