"""Provenance is typed in memory, text in files, and reads like a mapping of what is known."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.step.provenance import Costs, LossPlace, Planned, Provenance

FULL = Provenance(
    device="cuda",
    torch="2.13.0",
    threads=4,
    deterministic=False,
    name="a card",
    tf32="False True",
    cudnn="False False",
    mkldnn=True,
    products="bf16",
    machine="a100-80gb",
    costs=Costs.ROOFLINE,
    memory_bytes=2**36,
    usable_bytes=2**35,
    usable="less a half",
    optimizer="AdamW",
    offloaded="1 MiB to the disk",
    optimizer_step="2 MiB",
    estimate="captured on cpu",
    mapped="nothing",
    workspace="none",
    loss=LossPlace.OUTSIDE,
    planned=Planned.CACHED,
    notes={"moves": "12", "coarse ops": "3"},
    effort=2000,
    seed=1,
)
AS_TEXT = {
    "device": "cuda",
    "torch": "2.13.0",
    "threads": "4",
    "deterministic": "False",
    "name": "a card",
    "tf32": "False True",
    "cudnn": "False False",
    "mkldnn": "True",
    "products": "bf16",
    "machine": "a100-80gb",
    "costs": "roofline",
    "memory_bytes": "68719476736",
    "usable_bytes": "34359738368",
    "usable": "less a half",
    "optimizer": "AdamW",
    "offloaded": "1 MiB to the disk",
    "optimizer_step": "2 MiB",
    "estimate": "captured on cpu",
    "mapped": "nothing",
    "workspace": "none",
    "loss": "outside the model: what it takes is not counted",
    "planned": "from the plan cache",
    "moves": "12",
    "coarse ops": "3",
    "effort": "2000",
    "seed": "1",
}


def test_every_fact_has_its_text_and_comes_back_from_it() -> None:
    assert FULL.as_dict() == AS_TEXT
    assert list(FULL.as_dict()) == list(AS_TEXT), "the order of a plan file"
    assert Provenance.from_dict(AS_TEXT) == FULL
    default = Provenance()
    unset = [each.name for each in fields(Provenance) if getattr(FULL, each.name) == getattr(default, each.name)]
    assert not unset, "this test is to have every field"


def test_what_is_not_known_is_absent() -> None:
    assert Provenance().as_dict() == {}
    assert Provenance.from_dict({}) == Provenance()
    zero = Provenance(seed=0, effort=0, threads=0, deterministic=False)
    assert zero.as_dict() == {"threads": "0", "deterministic": "False", "effort": "0", "seed": "0"}


def test_it_reads_like_the_mapping_that_a_file_holds() -> None:
    assert dict(FULL) == AS_TEXT
    assert len(FULL) == len(AS_TEXT)
    assert FULL["costs"] == "roofline"
    assert FULL["moves"] == "12"
    assert FULL.get("nothing") is None
    assert "planned" not in Provenance()
    with pytest.raises(KeyError):
        Provenance()["device"]


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        ("threads", "four"),
        ("deterministic", "yes"),
        ("costs", "guessed"),
        ("planned", "never"),
        ("loss", ""),
        ("memory_bytes", "1" * 5000),
    ],
)
def test_text_of_another_kind_is_refused(fact: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"four|yes|guessed|never|valid|digits"):
        Provenance.from_dict({fact: text})


def test_a_note_may_not_hide_a_field() -> None:
    with pytest.raises(AssertionError, match="seed"):
        Provenance(notes={"seed": "3"})


@given(st.dictionaries(st.text(), st.text()).filter(lambda notes: not notes.keys() & AS_TEXT.keys()))
def test_notes_of_any_name_survive(notes: dict[str, str]) -> None:
    found = Provenance(notes=notes)
    assert Provenance.from_dict(found.as_dict()) == found
    assert hash(Provenance.from_dict(found.as_dict())) == hash(found)


def test_it_survives_copying_and_pickling() -> None:
    assert copy.deepcopy(FULL) == FULL
    assert pickle.loads(pickle.dumps(FULL)) == FULL
