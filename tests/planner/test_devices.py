"""The table of devices, and files that extend it."""

from __future__ import annotations

import json

import pytest

from tfgpipe.planner import devices
from tfgpipe.planner.devices import TABLE, Device, Link
from tfgpipe.schedules.kinds import FORWARD

pytestmark = pytest.mark.pure

LINK = Link(bandwidth=1e9, latency=0)


def device(**values):
    usual = {
        "name": "toy",
        "flops": {"float32": 100.0},
        "memory": 1000.0,
        "bandwidth": 10.0,
        "link": LINK,
        "network": Link(bandwidth=1e6, latency=1),
        "group": 4,
        "efficiency": 0.5,
    }
    return Device(**{**usual, **values})


def test_a_product_takes_its_flops_and_reads_its_weights():
    # 200 FLOP at 50 a second, 30 bytes at 10 a second.
    assert device().product_seconds(
        FORWARD, 200, rows=1, weights=30, dtype="float32"
    ) == pytest.approx(4 + 3)


def test_measured_rates_stand_in_for_the_peak():
    measured = device(rates={"forward": ((10, 20.0), (1000, 40.0)), "backward": ()})

    def seconds(rows):
        return measured.product_seconds(
            FORWARD, 120, rows=rows, weights=1e9, dtype="float32"
        )

    assert [seconds(rows) for rows in (1, 10, 100, 1000, 1e6)] == pytest.approx(
        [6, 6, 4, 3, 3]
    )


def test_devices_of_a_group_are_closer():
    assert device().link_across(4) == device().link
    assert device().link_across(5) == device().network


@pytest.mark.parametrize(
    ("num", "stride", "cards"),
    [(8, 1, 4), (4, 2, 2), (2, 4, 1), (2, 8, 1), (2, 3, 1)],
)
def test_a_ring_of_several_groups_uses_the_cards_of_its_devices(num, stride, cards):
    """Groups of four, of which every device, every second, or one is on the ring."""
    each = device(network_cards=4).ring_link(num, stride=stride)
    assert each == Link(bandwidth=cards * 1e6, latency=1)
    assert device().ring_link(num, stride=stride) == device().network


def test_a_ring_is_no_faster_than_the_link_of_a_group():
    slow = Link(bandwidth=3e6, latency=0)
    assert device(network_cards=4, link=slow).ring_link(8).bandwidth == 3e6
    assert device(network_cards=4, link=slow).ring_link(4) == slow
    slower = Link(bandwidth=1e3, latency=0)
    assert device(network_cards=4, link=slower).ring_link(8).bandwidth == 1e6


def test_a_number_of_rails_is_above_0():
    with pytest.raises(
        ValueError, match=r"`network_cards` of a device is above 0. Received 0"
    ):
        device(network_cards=0)


def test_an_unknown_device_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"Received 'h100-80'. Did you mean h100-80g"):
        devices.find("h100-80")
    with pytest.raises(ValueError, match=r"tpu-v3-16g.*Describe your own in a file"):
        devices.find("abacus")


def test_a_type_without_a_peak_is_refused():
    with pytest.raises(ValueError, match=r"peaks for float32. Received .* bfloat16"):
        device().peak("bfloat16")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"memory": 0}, "`memory` of a device is above 0. Received 0"),
        ({"efficiency": 1.5}, "`efficiency` of device 'toy' is a share"),
    ],
)
def test_impossible_devices_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        device(**values)


def test_a_link_has_bandwidth():
    with pytest.raises(ValueError, match="`bandwidth` of a link is above 0"):
        Link(bandwidth=0, latency=0)


def test_a_toml_file_says_what_differs(tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text(
        '[mine]\nlike = "h100-80g"\nefficiency = 0.71\n'
        "[mine.network]\nbandwidth = 1e9\nlatency = 1e-3\n"
        "[mine.rates]\nforward = [[64, 1e9]]\nbackward = [[64, 2e9]]\n"
    )
    mine = devices.find("mine", devices.read(path))
    assert (mine.efficiency, mine.memory) == (0.71, TABLE["h100-80g"].memory)
    assert mine.network == Link(bandwidth=1e9, latency=1e-3)
    assert mine.rates == {"forward": ((64, 1e9),), "backward": ((64, 2e9),)}


def test_a_json_file_describes_a_device_whole(tmp_path):
    path = tmp_path / "devices.json"
    link = {"bandwidth": 5, "latency": 0}
    values = {"flops": {"float32": 1}, "memory": 2, "bandwidth": 3}
    path.write_text(json.dumps({"own": {**values, "link": link, "network": link}}))
    own = devices.read(path)["own"]
    assert (own.name, own.memory, own.link.bandwidth) == ("own", 2, 5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[a]\nlike = "h100-80g"\nspeed = 3\n', "Received `speed`"),
        ("[a]\nmemory = 3\n", "It lacks flops, bandwidth, link, network"),
        ('[a]\nlike = "b"\n', "Received 'b'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, words):
    path = tmp_path / "devices.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        devices.read(path)
