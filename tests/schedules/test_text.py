"""Schedules as text: what is written is read back, as is what torch writes."""

from __future__ import annotations

import pytest
from hypothesis import given

import tfgpipe
from tests.helpers.some_schedules import plans
from tfgpipe import Schedule, schedules
from tfgpipe.schedules import draw

pytestmark = pytest.mark.pure


@given(plans())
def test_a_schedule_is_read_back_from_csv(plan):
    assert Schedule.from_csv(plan.to_csv(), name=plan.name) == plan


def test_one_of_a_branching_model_is_read_back_with_its_data_flow():
    flow = schedules.DataFlow(((), (), (0, 1)))
    plan = schedules.one_f_one_b(3, 3, flow=flow)
    assert Schedule.from_csv(plan.to_csv(), flow=flow, name=plan.name) == plan
    drawn = schedules.draw(plan)
    assert Schedule.from_drawing(drawn, flow=flow, name=plan.name) == plan


@given(plans())
def test_a_schedule_is_read_back_from_its_drawing(plan):
    drawn = draw(plan)
    placement = plan.placement
    assert Schedule.from_drawing(drawn, placement=placement, name=plan.name) == plan
    if placement == tuple(k % plan.num_devices for k in range(plan.num_stages)):
        assert Schedule.from_drawing(drawn, name=plan.name) == plan


def test_a_row_is_a_device_and_a_column_a_time_slot():
    assert schedules.find("zero_bubble")(2, 2).to_csv().splitlines() == [
        "0F0,0F1,,0I0,0W0,0I1,0W1",
        ",1F0,1I0,1F1,1I1,1W0,1W1",
    ]


# As `_dump_csv` of torch.distributed.pipelining writes it: rows in the order of ranks,
# with carriage returns, an empty cell for None.
COMPUTE = "0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n"
COMMUNICATION = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\r\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RESHARD\r\n"
)


@pytest.mark.parametrize("text", [COMPUTE, COMMUNICATION, COMPUTE.replace("\r", "")])
def test_a_file_of_torch_is_read(text):
    found = Schedule.from_csv(text, name="1f1b")
    assert found == schedules.one_f_one_b(2, 2)


@pytest.mark.parametrize("half", ["B", "I"])
def test_a_backward_with_weight_gradients_of_its_own_is_a_half(half):
    text = f"0F0,0F1,0{half}0,0W0,0B1\n"
    found = [str(a.kind) for a in Schedule.from_csv(text).orders[0]]
    assert found == [
        *("forward", "forward", "backward_input", "backward_weight", "backward")
    ]


def test_a_whole_backward_has_two_letters_in_older_files():
    old = Schedule.from_csv("0F0,0SEND_F0,0RECV_B0,0BW0\n1RECV_F0,1F0,1BW0,1SEND_B0\n")
    assert old.orders == schedules.gpipe(2, 1).orders


def test_actions_that_overlap_run_one_after_the_other():
    text = "0F0,0F1,,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    assert [str(a) for a in Schedule.from_csv(text).orders[1]] == [
        *("F0", "F1", "B0", "B1")
    ]


def test_stages_are_where_the_file_has_them():
    folded = schedules.find("zbv")(6, 4, num_devices=3)
    assert Schedule.from_csv(folded.to_csv()).placement == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "0F0,0X0\n",
            r"such as 2F0; letters are F, B, I, W, BW\. Received '0X0' in row 1",
        ),
        ("0F0,0B0\n1F0,1F\n", r"of a microbatch, such as 2F0\. Received '1F' in row 2"),
        ("0F0,0B0\nF0\n", "Received 'F0' in row 2"),
        ("0F0,0B0,0F1\n", "lacks backward of stage 0, microbatch 1"),
        ("1F0,1B0\n", "lacks backward of stage 0, microbatch 0, and 1 more"),
        ("0F0,0B0\n1F0,1B0\n0F1,1F1,1B1,0B1\n", "on one device"),
        ("", "`num_stages` must be an integer of at least 1"),
        ("999999999F999999999\n", "at most"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        Schedule.from_csv(text)


def test_a_deadlock_in_a_file_is_told_as_a_cycle_of_actions():
    text = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"
    words = (
        "backward of stage 0, microbatch 0, on device 0 waits for the backward of "
        "stage 1, microbatch 0, on device 1; the forward of stage 1, microbatch 1, "
        "on device 1 waits for the forward of stage 0, microbatch 1, on device 0"
    )
    with pytest.raises(ValueError, match=words):
        Schedule.from_csv(text)


def test_an_action_that_torch_does_not_have_is_not_written():
    own = schedules.ActionKind("offload", "O", "offload", "#000000")
    plan = schedules.gpipe(1, 1).insert_before(own, schedules.kinds.BACKWARD)
    with pytest.raises(ValueError, match=r"an action of kind 'offload'\. Write the"):
        plan.to_csv()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F0 B0", "such as `stage 0  F0 .. B0`"),
        ("stage 1  F0 B0", "such as `stage 0  F0 .. B0`"),
        ("stage 0  F0 Z0", "Received 'Z0' on device 0"),
        ("device 0  F0a F0c", "Received 'F0c' on device 0, which has 2 stages"),
    ],
)
def test_a_text_that_is_no_drawing_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        Schedule.from_drawing(text, placement=[0, 0])


def test_a_schedule_of_a_file_is_simulated():
    plan = Schedule.from_csv(COMPUTE)
    step = tfgpipe.simulate(plan, tfgpipe.Costs()).timeline.step_time
    assert step == 3 * 2 + 3  # Microbatches, and the bubble of (K - 1) (1 + 2).
