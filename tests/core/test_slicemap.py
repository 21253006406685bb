"""The map of slices, as text and as a picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.model import InstanceState
from mig_agent.core.slicemap import STYLES, SliceMapBlock, SliceMapGpu, filled, render_legend, render_lines, render_text
from mig_agent.core.slicemap_svg import describe, render_svg, render_tile
from mig_agent.core.slicemap_svg import render_legend as render_svg_legend

GPU = SliceMapGpu(
    title="GPU 1  NVIDIA H100 80GB HBM3",
    memory_slices=8,
    blocks=(
        SliceMapBlock(start=0, size=4, label="3g.40gb", state="leased", holder="pod team-a/train-7f2c"),
        SliceMapBlock(start=4, size=1, label="1g.10gb", state="idle"),
        SliceMapBlock(start=6, size=1, label="1g.10gb+me", state="foreign"),
    ),
)
PICTURE = """\
GPU 1  NVIDIA H100 80GB HBM3
┌───────────────────────────────────┬────────┬────────┬────────┬────────┐
│███████████████████████████████████│░░░░░░░░│        │▒▒▒▒▒▒▒▒│        │
│3g.40gb                            │1g.10gb │        │1g.10gb…│        │
│leased                             │idle    │free    │foreign │free    │
│pod team-a/train-7f2c              │        │        │        │        │
└0────────1────────2────────3───────┴4───────┴5───────┴6───────┴7───────┘"""
ASCII_PICTURE = """\
GPU 1  NVIDIA H100 80GB HBM3
+---------------------------+------+------+------+------+
|###########################|......|      |//////|      |
|3g.40gb                    |1g.10~|      |1g.10~|      |
|leased                     |idle  |free  |forei~|free  |
|pod team-a/train-7f2c      |      |      |      |      |
+0------1------2------3-----+4-----+5-----+6-----+7-----+"""


def test_the_map_as_people_see_it() -> None:
    assert render_text(GPU) == PICTURE


SHARED = SliceMapGpu(
    title="GPU 0: NVIDIA L40S, shared",
    name="GPU 0 shared, L40S",
    memory_slices=1,
    shared_mib=44_000,
    blocks=(
        SliceMapBlock(start=0, size=4_224, label="4 GiB", state="leased", holder="alice"),
        SliceMapBlock(start=4_224, size=1_152, label="1 GiB", state="leased", holder="bob"),
        SliceMapBlock(start=5_376, size=16_256, label="15.75 GiB", state="leased", holder="carol"),
        SliceMapBlock(start=21_632, size=2_048, label="2 GiB", state="foreign"),
    ),
)
SHARED_PICTURE = """\
GPU 0: NVIDIA L40S, shared
┌──────┬──┬────────────────────────────┬───┬───────────────────────────────────┐
│██████│██│████████████████████████████│▒▒▒│                                   │
│4 GiB │1…│15.75 GiB                   │2 …│19.84 GiB                          │
│leased│l…│leased                      │fo…│free                               │
│alice │b…│carol                       │   │                                   │
└0─────┴──┴5.2─────────────────────────┴───┴23.1───────────────────────────────┘"""


def test_a_shared_gpu_is_a_bar_of_its_memory() -> None:
    assert render_text(SHARED) == SHARED_PICTURE
    (line,) = render_lines([SHARED])
    assert line.startswith("GPU 0 shared, L40S │█al…│█…│█carol 15.75 GiB")
    assert re.search(r"│▒…│ 19.84 GiB free +│$", line)
    assert describe(SHARED).startswith("GPU 0: NVIDIA L40S, shared: 4 GiB, leased, alice; 1 GiB, leased, bob; ")


def test_a_shared_gpu_has_gib_below_it_in_the_picture() -> None:
    root = ET.fromstring(render_svg([SHARED]))  # noqa: S314 -- our own text
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [each for each in words if re.fullmatch(r"0 GiB|\d+", each or "")] == ["0 GiB", *map(str, range(4, 41, 4))]


def test_the_map_in_sixty_columns_of_ascii() -> None:
    assert render_text(GPU, 60, unicode=False) == ASCII_PICTURE


DEAD = f"│{STYLES['unusable'].fill * 8}│"
LINES = """\
                      0      1      2      3      4      5      6      7
GPU 0 A100-SXM4-40GB │█alice│      │░1g.10gb     │             │█train│@@@@@@│
GPU 1 H100 80GB HBM3 │█team-a/train-7f2c 3g.40gb │             │▒1g.1…│      │
GPU 2 whole          │░whole                                                 │""".replace("@", STYLES["unusable"].fill)


def in_lines() -> list[SliceMapGpu]:
    """Three GPUs as a busy node has them."""
    first = (
        SliceMapBlock(start=0, size=1, label="1g.5gb", state="leased", holder="alice"),
        SliceMapBlock(start=2, size=2, label="1g.10gb", state="idle"),
        SliceMapBlock(start=6, size=1, label="1g.5gb", state="leased", holder="train"),
    )
    second = (
        SliceMapBlock(start=0, size=4, label="3g.40gb", state="leased", holder="team-a/train-7f2c"),
        SliceMapBlock(start=6, size=1, label="1g.10gb+me", state="foreign"),
    )
    whole = SliceMapBlock(start=0, size=1, label="whole", state="idle")
    return [
        SliceMapGpu(title="", name="GPU 0 A100-SXM4-40GB", memory_slices=8, blocks=first, unusable=frozenset({7})),
        SliceMapGpu(title="", name="GPU 1 H100 80GB HBM3", memory_slices=8, blocks=second),
        SliceMapGpu(title="", name="GPU 2 whole", memory_slices=1, blocks=(whole,)),
    ]


def test_a_gpu_in_one_line() -> None:
    assert "\n".join(render_lines(in_lines())) == LINES


def test_lines_in_colour_and_in_ascii_say_the_same() -> None:
    painted = render_lines(in_lines(), color=True)
    assert "\x1b[32m█" in painted[1]
    assert re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(painted)) == LINES
    assert all(line.isascii() for line in render_lines(in_lines(), unicode=False))
    assert "|::::::|" in render_lines(in_lines(), unicode=False)[1]


def test_colour_adds_nothing_but_colour() -> None:
    painted = render_text(GPU, color=True)
    assert "\x1b[32m" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == PICTURE


def test_states_are_distinct_without_colour() -> None:
    assert set(STYLES) == {state.value for state in InstanceState} | {"free", "unusable"}
    for fills in ([style.fill for style in STYLES.values()], [style.ascii_fill for style in STYLES.values()]):
        assert len(set(fills)) == len(fills)
    assert all(style.ascii_fill.isascii() for style in STYLES.values())


def test_a_whole_gpu_is_one_block() -> None:
    block = SliceMapBlock(start=0, size=1, label="whole GPU", state="leased", holder="alice")
    text = render_text(SliceMapGpu(title="GPU 0", memory_slices=1, blocks=(block,)))
    assert "│whole GPU" in text
    assert max(map(len, text.split("\n"))) == 80


def test_twelve_slices_fit_in_eighty_columns() -> None:
    text = render_text(SliceMapGpu(title="GPU 0", memory_slices=12))
    assert max(map(len, text.split("\n"))) <= 80
    assert text.endswith("10────11───┘")


def test_a_gpu_without_a_map_is_its_title() -> None:
    assert render_text(SliceMapGpu(title="GPU 4  lost: it fell off the bus", memory_slices=0)) == (
        "GPU 4  lost: it fell off the bus"
    )


def test_free_ranges_are_filled_in() -> None:
    assert [(each.start, each.size, each.state) for each in filled(GPU)] == [
        (0, 4, "leased"),
        (4, 1, "idle"),
        (5, 1, "free"),
        (6, 1, "foreign"),
        (7, 1, "free"),
    ]


def test_free_slices_that_nothing_fits_on_are_told_apart() -> None:
    gpu = SliceMapGpu(title=GPU.title, memory_slices=8, blocks=GPU.blocks, unusable=frozenset({7}))
    assert [(each.start, each.state) for each in filled(gpu)][-2:] == [(6, "foreign"), (7, "unusable")]
    assert DEAD in render_text(gpu)
    assert "|::::::|" in render_text(gpu, 60, unicode=False)
    assert render_legend(["unusable"]) == f"[{STYLES['unusable'].fill * 2}] unusable (no profile fits)"


def test_wide_characters_take_two_columns() -> None:
    block = SliceMapBlock(start=0, size=8, label="7g.80gb", state="leased", holder="カロル" * 20)
    lines = render_text(SliceMapGpu(title="GPU", memory_slices=8, blocks=(block,))).split("\n")
    assert lines[5].startswith("│カロル")
    assert lines[5].endswith("…│")
    assert "?" in render_text(SliceMapGpu(title="GPU", memory_slices=8, blocks=(block,)), unicode=False)


def test_the_legend_explains_what_is_drawn() -> None:
    assert render_legend(["idle", "leased"]) == "[██] leased  [░░] idle"
    assert render_legend(unicode=False).isascii()
    assert "\x1b[36m[░░]\x1b[0m idle" in render_legend(color=True)


blocks = st.builds(
    SliceMapBlock,
    start=st.integers(-2, 14),
    size=st.integers(0, 9),
    label=st.text(max_size=20),
    state=st.one_of(st.sampled_from(list(STYLES)), st.text(max_size=5)),
    holder=st.text(max_size=40),
)
gpus = st.builds(
    SliceMapGpu,
    title=st.text(max_size=100),
    memory_slices=st.integers(0, 12),
    blocks=st.lists(blocks, max_size=8).map(tuple),
)


@given(gpu=gpus, width=st.integers(1, 200), color=st.booleans(), unicode=st.booleans())
def test_whatever_is_drawn_keeps_its_lines_and_its_width(
    gpu: SliceMapGpu, width: int, color: bool, unicode: bool
) -> None:
    text = render_text(gpu, width, color=color, unicode=unicode)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).split("\n")
    assert len(lines) == (7 if gpu.memory_slices else 1)
    assert all(line.isprintable() for line in lines)
    if width >= gpu.memory_slices * 3 + 1:
        assert all(len(line) <= width for line in lines)
    if not unicode:
        assert text.isascii()


shared_gpus = st.builds(
    SliceMapGpu,
    title=st.text(max_size=100),
    memory_slices=st.just(1),
    blocks=st.lists(
        st.builds(
            SliceMapBlock,
            start=st.integers(0, 90_000),
            size=st.integers(0, 50_000),
            label=st.text(max_size=20),
            state=st.sampled_from(list(STYLES)),
            holder=st.text(max_size=40),
        ),
        max_size=8,
    ).map(tuple),
    shared_mib=st.integers(1, 200_000),
)


@given(gpu=shared_gpus, width=st.integers(1, 200), unicode=st.booleans())
def test_a_shared_gpu_keeps_its_lines_and_its_width_however_small_its_shares_are(
    gpu: SliceMapGpu, width: int, unicode: bool
) -> None:
    drawn = render_text(gpu, width, unicode=unicode).split("\n")
    line = render_lines([replace(gpu, name="GPU 0")], width, unicode=unicode)
    assert (len(drawn), len(line)) == (7, 1)
    assert all(each.isprintable() and (unicode or each.isascii()) for each in (*drawn, *line))
    if width >= 3 * len(filled(gpu)) + 1:
        assert all(len(each) <= width for each in drawn)
    assert sum(each.size for each in filled(gpu)) == gpu.shared_mib
    root = ET.fromstring(render_svg([gpu]))  # noqa: S314 -- our own text
    assert all(float(each.attrib["width"]) > 0 for each in root.iter("{http://www.w3.org/2000/svg}rect"))


@given(several=st.lists(gpus, max_size=4), width=st.integers(1, 200), unicode=st.booleans())
def test_each_gpu_is_one_line_of_at_most_the_width(several: list[SliceMapGpu], width: int, unicode: bool) -> None:
    several = [replace(each, name=each.title[:20]) for each in several]
    lines = render_lines(several, width, unicode=unicode)
    assert len(lines) <= 2 * len(several)
    assert all(line.isprintable() and (unicode or line.isascii()) for line in lines)
    if several and width >= 8 + max(each.memory_slices for each in several) * 5:
        assert all(len(line) <= width for line in lines)


@given(gpu=gpus)
def test_blocks_cover_a_gpu_exactly_once(gpu: SliceMapGpu) -> None:
    position = 0
    for block in filled(gpu):
        assert block.start == position
        assert block.size > 0
        position += block.size
    assert position == gpu.memory_slices


def test_the_picture_shows_every_block_and_a_legend() -> None:
    svg = render_svg([GPU], caption="One node")
    root = ET.fromstring(svg)  # noqa: S314 -- our own text
    words = "".join(root.itertext())
    for word in ("One node", "3g.40gb", "pod team-a/train-7f2c", "leased", "idle", "foreign", "free"):
        assert word in words
    assert "http://" not in svg.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_picture_grows_with_the_gpus(count: int) -> None:
    root = ET.fromstring(render_svg([GPU] * count))  # noqa: S314 -- our own text
    assert float(root.attrib["height"]) >= 20 + 124 * count


@given(st.lists(gpus, max_size=3), st.text(max_size=50))
def test_any_text_makes_good_xml(several: list[SliceMapGpu], caption: str) -> None:
    ET.fromstring(render_svg(several, caption=caption))  # noqa: S314 -- our own text


@given(gpu=gpus)
def test_a_tile_has_its_gpu_in_words_and_loads_nothing(gpu: SliceMapGpu) -> None:
    for svg in (render_tile(gpu), *render_svg_legend([gpu])):
        root = ET.fromstring(svg)  # noqa: S314 -- our own text
        assert root.attrib["role"] == "img"
        assert not [each for each in root.iter() if {"href", "src", "style"} & set(each.attrib)]
    words = ET.fromstring(render_tile(gpu)).findtext("{http://www.w3.org/2000/svg}desc")  # noqa: S314 -- our own text
    assert words is not None
    assert words.count("slice") >= len(filled(gpu))


def test_the_words_of_a_picture_name_slices_state_and_holder() -> None:
    assert describe(GPU).startswith(
        "GPU 1  NVIDIA H100 80GB HBM3: slices 0-3: 3g.40gb, leased, pod team-a/train-7f2c; slice 4: 1g.10gb, idle; "
    )


def test_lines_of_several_nodes_end_in_the_same_column() -> None:
    """A node whose GPUs have one slice each is drawn as wide as one whose GPUs have eight."""
    name = "GPU 0 shared, L40S"
    eight = SliceMapGpu(title="", name=name, memory_slices=8, blocks=(), unusable=frozenset())
    one = SliceMapGpu(title="", name=name, memory_slices=1, blocks=(), unusable=frozenset())
    there, here = render_lines([eight], 80)[-1], render_lines([one], 80, slices=8)[-1]
    assert len(there) == len(here)
