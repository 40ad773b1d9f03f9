"""The code and its pages use the words of the field: none of those that were private to Shoal."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")
FOLDERS = ("src", "docs", "benchmarks", "tests", ".ci")

# Words, and what to say instead. A word is found in prose and as a part of a name.
BANNED = {
    "crews?": "FragmentExecutor, executor",
    "porters?": "ConnectionReader",
    "turnstiles?": "ChannelState",
    "outposts?": "RayHostActor",
    "mend|mends|mended|mender|menders|mending": "fix, restart, Supervisor",
    "onlookers?|looked on": "observer",
    "roster|rosters": "ReplicaSet",
    "hire|hires|hired|hiring": "ProcessSpec, launch, start",
    "crowds?": "WorkerMap",
    "anybody|somebody|everybody|nobody|whoever|whomever": "the process or replica that is meant",
    "whichever": "any, the one that",
    "anew": "again, restart",
    "(its|their) own pace": "asynchronous",
    "shyness|glance|glances": "epsilon exponent, peek",
    "tell|tells|told|telling": "report, log, send, receive, say",
    "hear|hears|heard|hearing": "receive",
    "(go|goes|gone|went|going) on": "continue, resume",
    "under way": "in flight, running",
    "lost turns?": "dropped rollouts",
    "knock|knocks": "probe",
    "patience": "a constant named *_TIMEOUT_S",
    "parcels?": "Codec, encoded message",
    "the how|how manieth": "n, index",
    "bear|bears|bore": "tolerate, accept",
    "(?<!tensor )boards?|desks?": "ControlBlock",
    "banks?": "snapshot slots",
    "seat|seats|seated": "WorkerId",
    "shelf|shelves": "SendBuffer",
    "sheets?": "ChannelSpec",
    "ears|doors?": "FrameHandler, listener",
    "guests?": "Peer",
    "greet|greets|greeting|greetings": "hello, handshake",
    "admitted": "accepted",
    "story|stories": "RunLogger",
    "done without": "optional",
    "lay": "layout",
}
PATTERN = re.compile("|".join(rf"(?<![a-z])(?:{word})(?![a-z])" for word in BANNED), re.IGNORECASE)


def words_of(line: str) -> str:
    """A line with its names taken apart: `HostAgent` and `host_agent` are `Host Agent`."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", line)
    return apart.replace("_", " ")


def banned_in(text: str) -> list[tuple[int, str]]:
    """The numbers of the lines that have banned words, each with the first of them."""
    found = ((n, PATTERN.search(words_of(line))) for n, line in enumerate(text.splitlines(), 1))
    return [(n, match.group()) for n, match in found if match]


def texts() -> list[Path]:
    """All text files of the project but this one."""
    kinds = {".py", ".md", ".js", ".css", ".html", ".toml", ".txt", ""}
    within = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")) if p.is_file()]
    readable = [p for p in within if p.suffix in kinds and "__pycache__" not in p.parts]
    return [p for p in (*readable, *(ROOT / page for page in PAGES)) if p != Path(__file__)]


@pytest.mark.parametrize("line", ["class Crew:", "my_crew = 1", "It is told.", "HireAll(x)"])
def test_a_banned_word_is_found_in_names_and_prose(line):
    assert banned_in(f"a fine line\n{line}")[0][0] == 2


@pytest.mark.parametrize("line", ["screw it", "shire", "whole", "a hearth", "foretell"])
def test_other_words_that_contain_one_are_not(line):
    assert banned_in(line) == []


def test_no_text_has_a_banned_word():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word!r}"
        for path in texts()
        for number, word in banned_in(path.read_text(encoding="utf-8"))
    ]
    message = "say it in the field's words (CONTRIBUTING.md, Words)"
    assert not found, f"{message}:\n" + "\n".join(found)


def test_a_ring_is_of_environments_and_nothing_else():
    # What channels hold are slots, and what metrics wait in is a buffer.
    files = sorted((ROOT / "src" / "shoal" / "runtime").rglob("*.py"))
    found = [
        p.name for p in files if re.search(r"\brings?\b", words_of(p.read_text()), re.IGNORECASE)
    ]
    assert files
    assert not found
