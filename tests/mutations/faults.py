"""The faults: what is planted where, and which tests are the first to look for it.

Each is of the kind that a person makes: an index that is off by one, a sum that is not
begun anew, a condition the wrong way round, a line that was forgotten. What does not
even run would be found by anything, and is not worth the time.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """A mistake to plant.

    Attributes:
        name: What is wrong then, in plain words.
        file: Where, from the root of the checkout.
        text: What it says there, once.
        instead: What it says with the fault.
        tests: Files or tests of the gate that should find it, as pytest takes them.
    """

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """Returns the text of the file with the fault in it.

        Raises:
            ValueError: If the text to replace is not there, or more than once.
        """
        if source.count(self.text) != 1:
            raise ValueError(
                f"{self.name}: expected once in {self.file}, received "
                f"{source.count(self.text)} times:\n{self.text}"
            )
        return source.replace(self.text, self.instead)


SCHEDULES = (
    Fault(
        "stages that share a device all go by the kind of their passes",
        "tfgpipe/simulation/search.py",
        "return [by_kind, by_stage] if has_choice else [by_kind]",
        "return [by_kind]",
        ("tests/simulation/test_search.py::test_a_head_in_parts_costs_its_work_alone",),
    ),
    Fault(
        "GPipe's backwards begin with the first microbatch",
        "tfgpipe/schedules/named/gpipe.py",
        "*reversed(passes(BACKWARD, range(p, K, P), M)),",
        "*passes(BACKWARD, range(p, K, P)[::-1], M),",
        ("tests/schedules/test_named.py::test_small_gpipes_are_those_drawn_by_hand",),
    ),
    Fault(
        "1F1B's warm-up is one forward short",
        "tfgpipe/schedules/named/one_f_one_b.py",
        "        return height\n",
        "        return max(height - 1, 1)\n",
        ("tests/schedules/test_named.py::test_a_small_1f1b_is_that_drawn_by_hand",),
    ),
    Fault(
        "the warm-up of interleaved stages is one forward too long",
        "tfgpipe/schedules/named/interleaved.py",
        "num_warmup=2 * (P - 1 - p) + (v - 1) * size + 1,",
        "num_warmup=2 * (P - 1 - p) + (v - 1) * size + 2,",
        (
            "tests/schedules/test_named.py::test_interleaved_holds_what_its_warm_up_begins",
        ),
    ),
    Fault(
        "zero bubble's gradients of weights come one microbatch early",
        "tfgpipe/schedules/filling.py",
        "held[p] + action.kind.in_flight <= most_held[p]",
        "held[p] + action.kind.in_flight < most_held[p]",
        (
            "tests/schedules/test_named.py::test_a_small_zero_bubble_is_that_drawn_by_hand",
        ),
    ),
    Fault(
        "the warm-up of two encoders is that of a line",
        "tfgpipe/schedules/data_flow.py",
        "heights[source] = max(heights[source], heights[k] + 1)",
        "heights[source] = self.num_stages - source",
        (
            "tests/schedules/test_data_flow.py::"
            "test_two_encoders_begin_and_end_together",
        ),
    ),
    Fault(
        "what a device holds is what it holds of most microbatches",
        "tfgpipe/schedules/schedule.py",
        "max(sum(n * sizes[k] for k, n in counts.items()) for counts in held)",
        "sum(self.in_flight[k] * sizes[k] for k in held[0])",
        (
            "tests/schedules/test_schedule.py::"
            "test_a_device_holds_most_bytes_where_its_larger_stage_is_in_flight",
        ),
    ),
    Fault(
        "a backward does not wait for that of the stage after",
        "tfgpipe/schedules/kinds.py",
        "return (schedule.brought(k, m), *later)",
        "return (action.of(FORWARD),)",
        (
            "tests/schedules/test_schedule.py::"
            "test_what_an_action_needs_is_what_the_drawing_of_dependencies_shows",
        ),
    ),
    Fault(
        "activations count as freed after the first half of a backward",
        "tfgpipe/schedules/kinds.py",
        "    in_backward=1,\n    recomputes=True,",
        "    in_flight=-1,\n    in_backward=1,\n    recomputes=True,",
        (
            "tests/schedules/test_named.py::"
            "test_what_stages_hold_is_counted_to_the_end_of_their_backwards",
        ),
    ),
    Fault(
        "a simulated action does not wait for transfers",
        "tfgpipe/simulation/simulator.py",
        "arrivals.get((d, k), ends[d])",
        "ends[d]",
        (
            "tests/simulation/test_simulator.py::test_a_simulated_step_follows_its_schedule",
        ),
    ),
    Fault(
        "what is on the host comes back before it has left",
        "tfgpipe/schedules/kinds.py",
        "FORWARD if self.in_flight < 0 else OFFLOAD",
        "FORWARD",
        (
            "tests/schedules/test_offload.py::"
            "test_the_backward_waits_for_the_copy_and_the_copy_for_the_forward",
        ),
    ),
    Fault(
        "a device does not wait until a microbatch has left",
        "tfgpipe/simulation/simulator.py",
        "max(device_free[p], end * frees)",
        "device_free[p]",
        (
            "tests/simulation/test_simulator.py::"
            "test_what_waits_for_slow_copies_is_counted_as_bubble",
        ),
    ),
    Fault(
        "a gather waits for its device as copies that free memory do not",
        "tfgpipe/simulation/simulator.py",
        "device_free[p] * (not frees)",
        "0",
        (
            "tests/schedules/test_gather.py::"
            "test_a_gather_takes_time_beside_the_passes_before",
        ),
    ),
    Fault(
        "a pass reads the weights that a gather before has gathered",
        "tfgpipe/schedules/schedule.py",
        "return (*needed, gather) if gather in self._gathers else needed",
        "return needed",
        (
            "tests/schedules/test_gather.py::"
            "test_a_device_that_comes_to_a_stage_has_gathered_its_weights",
        ),
    ),
    Fault(
        "a slice of a weight gets the gradients of all replicas",
        "tfgpipe/distribution/slices.py",
        "all_reduce.reduce_to([each[d] for each in parts], home.device)",
        "all_reduce.reduce_to([parts[d][d]], home.device)",
        ("tests/distribution/test_slices.py::test_they_train_as_the_plain_model",),
    ),
    Fault(
        "clipnorm is by the norm of all slices of a weight",
        "tfgpipe/distribution/replica_update.py",
        "owners += [i] * len(parts)",
        "owners += range(len(owners), len(owners) + len(parts))",
        ("tests/distribution/test_slices.py::test_they_train_as_the_plain_model",),
    ),
    Fault(
        "a running softmax scales what it has by the largest score so far",
        "tfgpipe/tensor_parallel/sequence.py",
        "scale = tf.exp(before - most)",
        "scale = tf.ones_like(most)",
        ("tests/tensor_parallel/test_sequence.py::test_grouped_queries",),
    ),
    Fault(
        "each part of a sequence draws its own rows of a draw",
        "tfgpipe/tensor_parallel/sequence.py",
        "first += rows[c]",
        "first += 0",
        ("tests/tensor_parallel/test_sequence.py::test_the_same_attention_is_dropped",),
    ),
    Fault(
        "a chunk of a causal sequence does not attend to its own later positions",
        "tfgpipe/tensor_parallel/sequence.py",
        "if is_diagonal:",
        "if False:",
        ("tests/tensor_parallel/test_sequence.py::test_grouped_queries",),
    ),
    Fault(
        "an expert that is full takes no more tokens",
        "tfgpipe/tensor_parallel/experts.py",
        "(rank <= capacity) & valid",
        "(rank <= capacity + 1) & valid",
        ("tests/tensor_parallel/test_experts.py::test_outputs_losses_and_gradients",),
    ),
    Fault(
        "experts are balanced within each example",
        "tfgpipe/tensor_parallel/experts.py",
        "share = tf.reduce_sum(choices * counted, axis=1) / (k * num)",
        "share = tf.reduce_mean(choices / k, axis=(0, 1))[None]",
        ("tests/tensor_parallel/test_experts.py::test_outputs_losses_and_gradients",),
    ),
    Fault(
        "the host gets what another stage's device has",
        "tfgpipe/runtime/executor.py",
        "ends = (home, host_device(home))",
        "ends = (host_device(home), host_device(home))",
        (
            "tests/models/test_offload.py::"
            "test_the_host_gets_what_the_plan_says_from_the_stage_itself[stage-1]",
        ),
    ),
    Fault(
        "simulated transfers on one link overlap",
        "tfgpipe/simulation/simulator.py",
        "start = max(end, link_free[link])",
        "start = end",
        (
            "tests/simulation/test_simulator.py::"
            "test_transfers_on_one_link_go_one_after_the_other",
        ),
    ),
    Fault(
        "a bubble is a share of stages' time, not of devices'",
        "tfgpipe/simulation/timeline.py",
        "return 1 - sum(self.utilisation) / self.schedule.num_devices",
        "return 1 - sum(self.utilisation) / self.schedule.num_stages",
        ("tests/simulation/test_simulator.py::test_interleaving_divides_the_bubble",),
    ),
    Fault(
        "recomputation is drawn as long as the first microbatch's forward",
        "tfgpipe/runtime/timer.py",
        "times[action.of(kinds.FORWARD)]",
        "times[Action(kinds.FORWARD, action.stage, 0)]",
        (
            "tests/runtime/test_timer.py::"
            "test_each_backward_recomputes_its_own_forward_and_at_most_until_it_ends",
        ),
    ),
    Fault(
        "recomputation is drawn as long as the first stage's forward",
        "tfgpipe/runtime/timer.py",
        "times[action.of(kinds.FORWARD)]",
        "times[action.of(kinds.FORWARD).at(0)]",
        (
            "tests/runtime/test_timer.py::"
            "test_each_backward_recomputes_its_own_forward_and_at_most_until_it_ends",
        ),
    ),
    Fault(
        "recomputation is drawn beyond the end of its backward",
        "tfgpipe/runtime/timer.py",
        "middle = min(start + float(forward[1] - forward[0]), end)",
        "middle = start + float(forward[1] - forward[0])",
        (
            "tests/runtime/test_timer.py::"
            "test_each_backward_recomputes_its_own_forward_and_at_most_until_it_ends",
        ),
    ),
)

PLANS = (
    Fault(
        "the second of two encoders begins in a stage of the first",
        "tfgpipe/partition/side_by_side.py",
        "        if cost < least:\n            best, least = _descent(",
        "        if cost > least:\n            best, least = _descent(",
        ("tests/partition/test_side_by_side.py",),
    ),
    Fault(
        "a plan has the schedule of stages in a line",
        "tfgpipe/partition/plans.py",
        "if order is settings.order and flow == before.data_flow:",
        "if order is settings.order:",
        (
            "tests/partition/test_plans.py::"
            "test_encoders_side_by_side_begin_a_stage_each",
        ),
    ),
    Fault(
        "a stage that ends with a named layer ends after its first call",
        "tfgpipe/partition/given.py",
        "last = {name: i for i, name in enumerate(calls)}",
        "last = {name: calls.index(name) for name in calls}",
        (
            "tests/models/test_pipelined_model.py::test_a_stage_ends_with_the_last_call_of_the_layer_that_is_named",
        ),
    ),
    Fault(
        "a planned partition is that of another number of shards",
        "tfgpipe/planner/plan_request.py",
        "*(cost, config.num_stages, config.num_shards, config.shard_axis),",
        "*(cost, config.num_stages),",
        (
            "tests/planner/test_plan_request.py::test_a_partition_is_of_the_shards_that_it_is_asked_for",
        ),
    ),
    Fault(
        "the bottleneck of a partition is the sum of its stages",
        "tfgpipe/partition/solver.py",
        "least = np.maximum(least[:, None], table).min(axis=0)",
        "least = np.add(least[:, None], table).min(axis=0)",
        (
            "tests/partition/test_solver.py::"
            "test_of_the_cuts_that_tie_the_fewest_bytes_come_before_the_evenest",
        ),
    ),
    Fault(
        "of equal partitions not the evenest is taken",
        "tfgpipe/partition/solver.py",
        "squares = cost**2 + counted",
        "squares = cost + counted",
        ("tests/partition/test_solver.py::test_of_the_cuts_that_tie_the_evenest_wins",),
    ),
    Fault(
        "with slack, a partition ignores the bytes between stages",
        "tfgpipe/partition/solver.py",
        "return _fewest_bytes(cost, bytes_in)",
        "return _fewest_bytes(cost, bytes_in if not slack else bytes_in * 0)",
        (
            "tests/partition/test_solver.py::"
            "test_slack_is_spent_on_bytes_and_never_exceeded",
        ),
    ),
    Fault(
        "planned memory leaves out a slot of the optimizer",
        "tfgpipe/costs/memory.py",
        "slots=num_slots * gradients,",
        "slots=min(num_slots, 1) * gradients,",
        (
            "tests/planner/test_memory.py::"
            "test_one_device_holds_state_and_all_activations",
        ),
    ),
    Fault(
        "planned memory counts recomputed activations of zero bubble once too few",
        "tfgpipe/costs/memory.py",
        "recomputed=_largest([begun[k] * x.recomputed for k, x in stages]),",
        "recomputed=_largest([max(begun[k] - 1, 1) * x.recomputed\n"
        "            for k, x in stages]),",
        (
            "tests/planner/test_memory.py::"
            "test_activations_and_what_is_recomputed_are_those_of_the_simulation",
        ),
    ),
    Fault(
        "planned memory takes a schedule of one's own for round robin",
        "tfgpipe/costs/memory.py",
        "[(k, stages[k]) for k, q in enumerate(self.placement) if q == p],",
        "[(k, stages[k]) for k in range(\n"
        "                    p, len(stages), max(self.placement) + 1)],",
        (
            "tests/planner/test_memory.py::"
            "test_a_schedule_on_devices_in_another_order_holds_its_own_stages",
        ),
    ),
    Fault(
        "planned memory takes all weights for float32",
        "tfgpipe/costs/profiler.py",
        "return sum(map(num_bytes, weights)) / count if count else 4",
        "return 4",
        (
            "tests/planner/test_models.py::"
            "test_weights_count_in_the_type_they_are_stored_in",
        ),
    ),
    Fault(
        "planned costs of forward and backward are exchanged",
        "tfgpipe/costs/layer_cost.py",
        "return self.backward if kind.is_backward else self.forward",
        "return self.forward if kind.is_backward else self.backward",
        (
            "tests/planner/test_step_time.py::"
            "test_a_layer_takes_its_products_and_its_traffic",
        ),
    ),
    Fault(
        "workspaces of the stages of one device add up",
        "tfgpipe/costs/memory.py",
        "return functools.reduce(np.maximum, values)",
        "return functools.reduce(np.add, values)",
        (
            "tests/partition/test_profiles.py::"
            "test_stages_of_one_device_share_the_largest_workspace",
        ),
    ),
    Fault(
        "plans recompute all microbatches but one, whatever the schedule",
        "tfgpipe/costs/memory.py",
        "return tuple((M - kept) / M for kept in self.kept)",
        "return tuple((M - 1) / M for kept in self.kept)",
        (
            "tests/partition/test_profiles.py::"
            "test_what_is_recomputed_is_counted_as_it_is_run",
        ),
    ),
    Fault(
        "what a stage holds of its inputs counts compressed",
        "tfgpipe/partition/profiles.py",
        "self.shards, remat, self.held_bytes",
        "self.shards, remat, self.received_bytes",
        ("tests/partition/test_profiles.py::test_memory_is_of_what_is_decoded",),
    ),
    Fault(
        "a model's memory leaves out the gradients",
        "tfgpipe/costs/memory.py",
        "gradients=gradients,",
        "gradients=0.0 * gradients,",
        (
            "tests/partition/test_plans.py::"
            "test_memory_counts_weights_gradients_slots_and_activations",
        ),
    ),
    Fault(
        "a partition is held to the least memory there is, not to the limit",
        "tfgpipe/partition/solver.py",
        "lambda c, n: np.where(n > memory_limit, math.inf, c), cost, need",
        "lambda c, n: np.where(n > most, math.inf, c), cost, need",
        ("tests/partition/test_solver.py::test_stages_may_differ_in_costs_and_memory",),
    ),
    Fault(
        "planned layers that cannot be sharded reduce over shards",
        "tfgpipe/planner/shard_axes.py",
        "if self.parts(layer, num_shards) == 1:",
        "if num_shards == 1:",
        (
            "tests/planner/test_step_time.py::"
            "test_a_layer_that_cannot_be_sharded_reduces_nothing",
        ),
    ),
    Fault(
        "planned reductions are not among what layers recompute",
        "tfgpipe/planner/step_time.py",
        "reduced = stage_work(exchanges, again)",
        "reduced = stage_work(exchanges, [1.0] * len(layers))",
        (
            "tests/planner/test_step_time.py::"
            "test_a_layer_that_cannot_be_sharded_reduces_nothing",
        ),
    ),
    Fault(
        "planned gradients of layers that cannot be sharded are shared",
        "tfgpipe/planner/memory.py",
        "trained=weights.trained_bytes / parts,",
        "trained=weights.trained_bytes / num_shards,",
        (
            "tests/planner/test_memory.py::"
            "test_beside_a_sharded_layer_one_that_does_not_divide_stays_whole",
        ),
    ),
    Fault(
        "planned workspaces of layers that cannot be sharded are shared",
        "tfgpipe/planner/memory.py",
        "+ weights.trained_bytes / parts,",
        "+ weights.trained_bytes / num_shards,",
        (
            "tests/planner/test_memory.py::"
            "test_beside_a_sharded_layer_one_that_does_not_divide_stays_whole",
        ),
    ),
    Fault(
        "planned workspaces of sharded layers hold whole gradients",
        "tfgpipe/planner/memory.py",
        "+ weights.trained_bytes / parts,",
        "+ weights.trained_bytes,",
        (
            "tests/planner/test_memory.py::"
            "test_shards_share_weights_and_what_is_not_whole",
        ),
    ),
    Fault(
        "planned recomputation of all stages of a device is held at once",
        "tfgpipe/costs/memory.py",
        "recomputed=_largest([begun[k] * x.recomputed for k, x in stages]),",
        "recomputed=sum(begun[k] * x.recomputed for k, x in stages),",
        (
            "tests/planner/test_memory.py::"
            "test_stages_of_one_device_recompute_one_at_a_time",
        ),
    ),
    Fault(
        "planned recomputation of layers holds a stage's first layer",
        "tfgpipe/remat/policy.py",
        "return largest + sum(inputs[span.start] for span in spans[1:])",
        "return sum(activations[spans[0]]) + sum(inputs[x.start] for x in spans[1:])",
        (
            "tests/planner/test_memory.py::"
            "test_stages_of_one_device_recompute_one_at_a_time",
        ),
    ),
    Fault(
        "planned parts of a sequence share out their weights",
        "tfgpipe/planner/step_time.py",
        "weights=of_weights * weights.count / parts * (",
        "weights=of_weights * weights.count / T * (",
        (
            "tests/planner/test_shard_axes.py::"
            "test_parts_of_a_sequence_share_arithmetic_and_not_weights",
        ),
    ),
    Fault(
        "planned experts get every token",
        "tfgpipe/planner/shard_axes.py",
        "there = 1 - math.comb(E - E // T, k) / math.comb(E, k)",
        "there = 1.0",
        (
            "tests/planner/test_shard_axes.py::"
            "test_experts_get_the_tokens_that_take_any_of_them",
        ),
    ),
    Fault(
        "a planned head in parts is whole on each device",
        "tfgpipe/planner/split_vocabulary.py",
        "count=head.weights.count / P",
        "count=head.weights.count",
        ("tests/planner/test_split_vocabulary.py::test_each_device_has_its_tokens",),
    ),
    Fault(
        "planned updates share out layers that cannot be sharded",
        "tfgpipe/planner/step_time.py",
        "layer.weights.trained_bytes / axis.weight_parts(layer, T)",
        "layer.weights.trained_bytes / T",
        (
            "tests/planner/test_step_time.py::"
            "test_the_device_of_most_trained_weights_updates_last",
        ),
    ),
    Fault(
        "planned updates are of frozen weights as well",
        "tfgpipe/planner/step_time.py",
        "layer.weights.trained_bytes / axis.weight_parts(layer, T)",
        "layer.weights.bytes / axis.weight_parts(layer, T)",
        (
            "tests/planner/test_step_time.py::"
            "test_the_device_of_most_trained_weights_updates_last",
        ),
    ),
    Fault(
        "planned updates are over when the device of fewest weights is done",
        "tfgpipe/planner/step_time.py",
        "update = max(update, traffic / device.bandwidth)",
        "update = min(update or 1e99, traffic / device.bandwidth)",
        (
            "tests/planner/test_step_time.py::"
            "test_the_device_of_most_trained_weights_updates_last",
        ),
    ),
    Fault(
        "planned gradients of replicas never leave a group of devices",
        "tfgpipe/planner/step_time.py",
        "link = device.ring_link(D, stride=P * T)",
        "link = device.ring_link(D)",
        (
            "tests/planner/test_step_time.py::"
            "test_the_device_of_most_trained_weights_updates_last",
        ),
    ),
    Fault(
        "planned boundaries are of the inputs of the stage before",
        "tfgpipe/planner/step_time.py",
        "for layers in staged.stages[1:]",
        "for layers in staged.stages[:-1]",
        (
            "tests/planner/test_step_time.py::"
            "test_a_step_of_unlike_stages_takes_what_was_worked_out_by_hand",
        ),
    ),
    Fault(
        "planned pipelines of shards never leave a group of devices",
        "tfgpipe/planner/step_time.py",
        "num = config.num_devices * config.num_shards",
        "num = config.num_devices",
        (
            "tests/planner/test_step_time.py::"
            "test_a_step_of_unlike_stages_takes_what_was_worked_out_by_hand",
        ),
    ),
    Fault(
        "the parts of a planned step are those of the idlest device",
        "tfgpipe/planner/step_time.py",
        "    busiest = max(\n",
        "    busiest = min(\n",
        (
            "tests/planner/test_step_time.py::"
            "test_a_step_of_unlike_stages_takes_what_was_worked_out_by_hand",
        ),
    ),
    Fault(
        "reductions of a planned step count as recomputation as well",
        "tfgpipe/planner/step_time.py",
        "recompute = sum(x.recompute - x.reductions.recompute for x in busiest)",
        "recompute = sum(x.recompute for x in busiest)",
        (
            "tests/planner/test_step_time.py::"
            "test_a_step_of_unlike_stages_takes_what_was_worked_out_by_hand",
        ),
    ),
    Fault(
        "reductions of a planned step are those of one microbatch",
        "tfgpipe/planner/step_time.py",
        "reductions=M * reductions,",
        "reductions=reductions,",
        (
            "tests/planner/test_step_time.py::"
            "test_a_step_of_unlike_stages_takes_what_was_worked_out_by_hand",
        ),
    ),
    Fault(
        "the lower bound of a step leaves out the backwards at its end",
        "tfgpipe/planner/step_time.py",
        "wait += sum(stage.backward for stage in stages[: min(mine)])",
        "wait += 0",
        (
            "tests/planner/test_step_time.py::"
            "test_a_lower_bound_is_the_work_of_a_device_and_its_wait_for_the_first",
        ),
    ),
)

GRADIENTS = (
    Fault(
        "each part of a sequence drops what the first one does",
        "tfgpipe/tensor_parallel/positionwise.py",
        "return [(first, length) for first in itertools.islice(ends, chunks.num)]",
        "return [(0, length) for first in itertools.islice(ends, chunks.num)]",
        ("tests/tensor_parallel/test_positionwise.py",),
    ),
    Fault(
        "sums of exponentials are added up as if all parts had the largest logit",
        "tfgpipe/layers/split_vocabulary.py",
        "total = tf.reduce_sum(total * tf.exp(less), axis=0)",
        "total = tf.reduce_sum(total, axis=0)",
        ("tests/layers/test_split_vocabulary.py",),
    ),
    Fault(
        "a part of a vocabulary has the first token of the next one as well",
        "tfgpipe/layers/split_vocabulary.py",
        "(row >= 0) & (row < self.num_tokens)",
        "(row >= 0) & (row <= self.num_tokens)",
        ("tests/layers/test_split_vocabulary.py",),
    ),
    Fault(
        "chains of which others read other results share a function",
        "tfgpipe/graph/passes/fusion.py",
        "key += repr((specs, results)).encode()",
        "key += repr(specs).encode()",
        (
            "tests/graph/passes/test_fusion.py::"
            "test_equal_chains_of_which_others_read_other_results_share_no_function",
        ),
    ),
    Fault(
        "a model that was trained stays in memory",
        "tfgpipe/_compat/custom_gradients.py",
        "registered[name] = {**registered[name], registry._TYPE_TAG: gradient}",
        "del gradient",
        ("tests/_compat/test_custom_gradients.py::test_a_trained_pipeline_is_freed",),
    ),
    Fault(
        "the gradient of a cross entropy does not know the label",
        "tfgpipe/graph/passes/cross_entropy.py",
        "tf.where(is_label, probability - 1.0, probability)",
        "probability",
        ("tests/graph/passes/test_cross_entropy.py::test_losses_and_gradients",),
    ),
    Fault(
        "a cross entropy overflows where logits are large",
        "tfgpipe/graph/passes/cross_entropy.py",
        "exponentials = tf.exp(logits - largest)",
        "exponentials = tf.exp(logits) / tf.exp(largest)",
        ("tests/graph/passes/test_cross_entropy.py::test_losses_and_gradients",),
    ),
    Fault(
        "a label that is no class is counted as the last one",
        "tfgpipe/graph/passes/cross_entropy.py",
        "tf.gather(logits, labels, batch_dims=1)",
        "tf.gather(logits, labels % logits.shape[1], batch_dims=1)",
        (
            "tests/graph/passes/test_cross_entropy.py::"
            "test_a_label_that_is_no_class_is_an_error",
        ),
    ),
    Fault(
        "a product has its axes in another order than the einsum",
        "tfgpipe/graph/passes/batched_einsum.py",
        "return _transposed(product, made, result)",
        "return tf.reshape(product, [sizes[x] for x in result])",
        (
            "tests/graph/passes/test_batched_einsum.py::"
            "test_einsums_and_their_gradients",
        ),
    ),
    Fault(
        "matrices of an einsum that lie behind one another are transposed",
        "tfgpipe/graph/passes/batched_einsum.py",
        "is_transposed = letters[-1] in free",
        "is_transposed = letters[-1] in contracting",
        (
            "tests/graph/passes/test_batched_einsum.py::"
            "test_matrices_are_multiplied_as_they_lie",
        ),
    ),
    Fault(
        "what a gradient alone computes of the forward counts for no chain",
        "tfgpipe/graph/passes/fusion.py",
        "and self._is_profitable(self._with_own(group))",
        "and self._is_profitable(group)",
        ("tests/graph/passes/test_cross_entropy.py::test_losses_and_gradients",),
    ),
    Fault(
        "a rewriting is undone by the next one",
        "tfgpipe/graph/joint_graph.py",
        "known = {name: new(inputs) for name, inputs in self.edges.items()}",
        "known = {name: new(x) for name, x in edges(self.graph, {}, {}).items()}",
        ("tests/graph/test_joint_graph.py::test_rewritings_follow_one_another",),
    ),
    Fault(
        "forwards that run again for a gradient read the variables of then",
        "tfgpipe/runtime/pipeline.py",
        "initial_state=initial_state or read_variables(",
        "initial_state=read_variables(",
        (
            "tests/runtime/test_evaluation.py::"
            "test_a_tape_around_a_function_that_was_traced_outside_has_gradients",
        ),
    ),
    Fault(
        "forwards run again for a gradient though they draw other numbers",
        "tfgpipe/runtime/pipeline.py",
        "if evaluates and step.has_side_effects:",
        "if not step.traced:",
        (
            "tests/runtime/test_evaluation.py::"
            "test_what_draws_other_numbers_each_time_is_not_run_twice",
        ),
    ),
    Fault(
        "the gradient of the last microbatch is dropped",
        "tfgpipe/runtime/executor.py",
        "for row in self._split_values(grads or {}, self.step.producers)\n        ]",
        "for row in self._split_values(grads or {}, self.step.producers)[1:]\n"
        "        ] + [{}]",
        ("tests/models/test_pipelined_model.py::test_single_batches",),
    ),
    Fault(
        "the gradient of a microbatch takes the place of the sum so far",
        "tfgpipe/stage/accumulation.py",
        "added = tf.raw_ops.InplaceAdd(",
        "added = tf.raw_ops.InplaceUpdate(",
        (
            "tests/stage/test_accumulation.py::test_all_forms_give_the_sum_of_the_gradients",
        ),
    ),
    Fault(
        "rows of deferred products overwrite those of the microbatch before",
        "tfgpipe/stage/accumulation.py",
        "return [*added, *stacked, count + 1]",
        "return [*added, *stacked, count]",
        (
            "tests/stage/test_accumulation.py::test_all_forms_give_the_sum_of_the_gradients",
        ),
    ),
    Fault(
        "a sum of gradients begins with what its memory holds",
        "tfgpipe/graph/joint_graph.py",
        "tf.raw_ops.Empty(shape=spec.shape, dtype=spec.dtype, init=True)",
        "tf.raw_ops.Empty(shape=spec.shape, dtype=spec.dtype, init=False)",
        (
            "tests/stage/test_accumulation.py::"
            "test_a_step_has_one_product_for_the_gradients_of_all_microbatches",
        ),
    ),
    Fault(
        "a row that a batch looks up twice has one gradient",
        "tfgpipe/stage/accumulation.py",
        "value = tf.math.unsorted_segment_sum(value, where, tf.size(rows))",
        "value = tf.math.unsorted_segment_max(value, where, tf.size(rows))",
        ("tests/models/test_models.py::test_the_gradient_of_each_use_is_in_the_sum",),
    ),
    Fault(
        "a weight that two stages share has the gradient of one",
        "tfgpipe/runtime/executor.py",
        "results[variable] = _sum(parts.get(variable, []), device)",
        "results[variable] = _sum(parts.get(variable, [])[:1], device)",
        ("tests/models/test_models.py::test_the_gradient_of_each_use_is_in_the_sum",),
    ),
    Fault(
        "a value that two stages read has the gradient of one",
        "tfgpipe/runtime/executor.py",
        "gradient = _sum(self._grads[m].pop(key, []), run.device)",
        "gradient = _sum(self._grads[m].pop(key, [])[:1], run.device)",
        ("tests/models/test_models.py::test_a_skip_under_every_balance",),
    ),
    Fault(
        "a skip connection is that of the first microbatch",
        "tfgpipe/runtime/executor.py",
        "received[name] = self._values[m][key]",
        "skips = k and key not in self.step.traced[k - 1].output_keys\n                "
        "received[name] = self._values[0 if skips else m][key]",
        ("tests/models/test_models.py::test_a_skip_under_every_balance",),
    ),
    Fault(
        "a small step takes what it recomputes from where it was computed before",
        "tfgpipe/_compat/functions.py",
        "with tf.control_dependencies([tf.group(*here)]):",
        "with contextlib.nullcontext():",
        (
            "tests/runtime/test_memory.py::"
            "test_rematerialisation_at_least_halves_peak_memory",
        ),
    ),
    Fault(
        "a small step is not optimized by Grappler, though its functions are inlined",
        "tfgpipe/_compat/functions.py",
        "            self.inlines = _thread_options.options is None",
        "            self.inlines = False",
        (
            "tests/_compat/test_functions.py::"
            "test_inlined_calls_are_none_and_the_function_around_them_is_optimized",
        ),
    ),
    Fault(
        "the masked gradient of a quantized weight is not masked",
        "tfgpipe/stage/functions.py",
        "[values[g.finalized or g.values] for g in gradients]",
        "[values[g.values] for g in gradients]",
        (
            "tests/quantization/test_wrapper.py::"
            "test_weights_out_of_their_range_have_no_gradient",
        ),
    ),
    Fault(
        "an operation that two weights' gradients need is put with one's",
        "tfgpipe/graph/partitioner.py",
        "if not reached[name] & 1 and reached[name].bit_count() == 1",
        "if not reached[name] & 1 and reached[name].bit_count() >= 1",
        (
            "tests/graph/test_partitioner.py::"
            "test_without_gradients_of_inputs_the_chain_ends_at_the_first_layer",
        ),
    ),
    Fault(
        "on GPUs the rows of a microbatch take the place of those before",
        "tfgpipe/stage/accumulation.py",
        "return self.add(total, whole, shard)",
        "return self.add(tf.zeros_like(total), whole, shard)",
        (
            "tests/stage/test_accumulation.py::"
            "test_rows_of_a_table_are_summed_within_and_between_microbatches",
        ),
    ),
    Fault(
        "layers of another dtype policy share a trace",
        "tfgpipe/stage/dedup.py",
        'if key != "name" and not (is_keras',
        'if key not in ("name", "dtype") and not (is_keras',
        ("tests/stage/test_dedup.py::test_layers_that_differ_are_no_twins",),
    ),
)

WEIGHING = (
    Fault(
        "a replica's token waits for the step of the replica before",
        "tfgpipe/devices/names.py",
        "with tf.init_scope():\n        return tf.raw_ops.VarHandleOp",
        "with tf.control_dependencies(None):\n        return tf.raw_ops.VarHandleOp",
        (
            "tests/stage/test_output_masks.py::"
            "test_a_batch_normalization_before_a_mask_may_be_synchronized",
        ),
    ),
    Fault(
        "evaluation leaves out what layers add as a sum over examples",
        "tfgpipe/runtime/loss_pipeline.py",
        "            loss += tf.cast(summed, loss.dtype)",
        "            loss += 0 * tf.cast(summed, loss.dtype)",
        (
            "tests/models/test_layer_updates.py::test_three_steps_are_those_of_the_plain_model[1f1b]",
        ),
    ),
    Fault(
        "a row too many is in the microbatches of an uneven split",
        "tfgpipe/runtime/microbatch.py",
        "_as_integer(m < remainder)",
        "_as_integer(m <= remainder)",
        (
            "tests/runtime/test_microbatch.py::"
            "test_known_sizes_differ_by_at_most_one_and_none_is_empty",
        ),
    ),
    Fault(
        "microbatches of an uneven split weigh alike",
        "tfgpipe/runtime/microbatch.py",
        "return tf.math.divide_no_nan(tf.cast(self.sizes[m], dtype), total)",
        "return tf.math.divide_no_nan(tf.cast(self.sizes[0], dtype), total)",
        ("tests/models/test_pipelined_losses.py::test_added_losses",),
    ),
    Fault(
        "the gradient of an added loss counts once for each microbatch",
        "tfgpipe/runtime/executor.py",
        "tf.cast(grads[i], dtype) * weights[i] for i in are_sums",
        "tf.cast(grads[i], dtype) for i in are_sums",
        ("tests/models/test_pipelined_losses.py::test_added_losses",),
    ),
    Fault(
        "an added loss counts once for each microbatch",
        "tfgpipe/runtime/executor.py",
        "return [loss * weights[is_sum] for loss, is_sum in each]",
        "return [loss for loss, is_sum in each]",
        ("tests/models/test_pipelined_losses.py::test_added_losses",),
    ),
    Fault(
        "sample weights are normalised in each microbatch",
        "tfgpipe/runtime/losses.py",
        'if loss.reduction == "mean_with_sample_weight" and weights is not None:',
        'if loss.reduction == "weighted_mean" and weights is not None:',
        ("tests/runtime/test_losses.py::test_weights_of_rows_without_places",),
    ),
    Fault(
        "masked entries count in the weight of a microbatch",
        "tfgpipe/runtime/losses.py",
        "size = denominator(loss, self._reductions[index], [given, own], w, rows)",
        "size = denominator(loss, self._reductions[index], [own], w, rows)",
        ("tests/runtime/test_losses.py::test_several_losses_each_by_its_own_extent",),
    ),
    Fault(
        "sample weights do not reach the loss",
        "tfgpipe/runtime/losses.py",
        "mean = loss(y, p, w)",
        "mean = loss(y, p)",
        ("tests/runtime/test_losses.py::test_weights_of_rows_without_places",),
    ),
    Fault(
        "replicas weigh alike whatever their rows",
        "tfgpipe/runtime/losses.py",
        "return tf.where(are_sums, mine, current_strategy().sum_over_replicas(mine))",
        "return tf.where(are_sums, mine, mine * current_strategy().num_replicas)",
        (
            "tests/distribution/test_data_parallel.py::test_rows_weigh_alike_whatever_their_replica",
        ),
    ),
    Fault(
        "the loss is not scaled for half precision",
        "tfgpipe/pipelined_model.py",
        "loss_grad=scale,",
        "loss_grad=tf.ones([]),",
        (
            "tests/models/test_pipelined_model.py::test_any_optimizer_makes_the_plain_models_updates",
        ),
    ),
    Fault(
        "the penalty of a weight is not scaled where the loss is",
        "tfgpipe/pipelined_model.py",
        "gradient = penalty.gradient * tf.cast(scale, penalty.gradient.dtype)",
        "gradient = penalty.gradient",
        (
            "tests/models/test_pipelined_model.py::"
            "test_a_step_that_overflows_in_one_microbatch_is_left_out",
        ),
    ),
    Fault(
        "the penalty of a weight counts once for each replica",
        "tfgpipe/pipelined_model.py",
        "tape.gradient(loss, weight) / num_replicas",
        "tape.gradient(loss, weight)",
        (
            "tests/models/test_pipelined_placement.py::"
            "test_regularizers_count_once_whatever_the_number_of_replicas",
        ),
    ),
    Fault(
        "batches of unequal rows weigh alike in the mean of the loss",
        "tfgpipe/pipelined_model.py",
        "total, sample_weight=rows",
        "total, sample_weight=None",
        ("tests/models/test_pipelined_model.py::test_a_dataset_with_weights",),
    ),
    Fault(
        "batches of unequal rows weigh alike in the means of several losses",
        "tfgpipe/runtime/loss_pipeline.py",
        "tracker.update_state(part * num_replicas, sample_weight=batch_size)",
        "tracker.update_state(part * num_replicas)",
        (
            "tests/models/test_pipelined_model.py::"
            "test_losses_of_batches_of_unequal_rows_are_weighed",
        ),
    ),
    Fault(
        "sample weights of rows do not count where a mask has an axis more",
        "tfgpipe/runtime/losses.py",
        "counted = counted * tf.expand_dims(weights, -1)",
        "counted = counted * tf.ones_like(counted)",
        ("tests/runtime/test_losses.py::test_masks_meet_weights_of_any_rank",),
    ),
    Fault(
        "sample weights of a column do not count where a mask has an axis less",
        "tfgpipe/runtime/losses.py",
        "counted = counted * tf.squeeze(weights, -1)",
        "counted = counted * tf.ones_like(counted)",
        ("tests/runtime/test_losses.py::test_masks_meet_weights_of_any_rank",),
    ),
    Fault(
        "a model's own way to train is ignored",
        "tfgpipe/pipelined_model.py",
        "        _check_methods(layers)\n",
        "",
        (
            "tests/models/test_given_models.py::"
            "test_a_method_of_the_models_class_is_refused_by_name",
        ),
    ),
    Fault(
        "a step without a loss trains nothing",
        "tfgpipe/pipelined_model.py",
        "and all(loss is None for loss in others):",
        "and not others:",
        (
            "tests/models/test_given_models.py::"
            "test_without_a_loss_a_step_is_refused_as_by_keras",
        ),
    ),
    Fault(
        "weights that no layer owns are taken for its own",
        "tfgpipe/pipelined_model.py",
        "if v.trainable and v not in own",
        "if v.trainable and v in ()",
        (
            "tests/models/test_given_models.py::"
            "test_a_weight_that_no_layer_owns_is_refused_by_name",
        ),
    ),
    Fault(
        "the value of a weight in a graph is read where it was",
        "tfgpipe/capture/tracer.py",
        "if variable.value is value:",
        "if variable.value is value and not variable.trainable:",
        (
            "tests/models/test_given_models.py::"
            "test_the_value_of_a_weight_in_a_graph_is_refused",
        ),
    ),
    Fault(
        "with one microbatch an output of one example stands for the batch",
        "tfgpipe/runtime/layer_probes.py",
        "    if num_microbatches == 1 and _keeps_size(\n"
        "        captured, [*captured.graph.input_ids, *captured.graph.output_ids]\n"
        "    ):\n",
        "    if num_microbatches == 1:\n",
        (
            "tests/models/test_given_models.py::"
            "test_with_one_microbatch_outputs_that_join_the_batch_are_refused",
        ),
    ),
)

PROBES = (
    Fault(
        "one layer of each class is probed, whatever its configuration",
        "tfgpipe/runtime/layer_probes.py",
        'return (type(layer), repr({**layer.get_config(), "name": None}))',
        "return type(layer), layer.get_config() and None",
        (
            "tests/runtime/test_layer_probes.py::"
            "test_layers_of_a_class_are_probed_for_each_configuration",
        ),
    ),
    Fault(
        "layers are probed with the weights that they start with",
        "tfgpipe/runtime/traced_calls.py",
        "if not variable.trainable and keras_internals.variables.is_initialized(",
        "if keras_internals.variables.is_initialized(",
        (
            "tests/runtime/test_layer_probes.py::"
            "test_a_layer_that_mixes_examples_is_named[weights of zero]",
        ),
    ),
    Fault(
        "layers are probed in inference alone",
        "tfgpipe/runtime/traced_calls.py",
        "Interpreter(segment, keys, training=training)",
        "Interpreter(segment, keys, training=False)",
        (
            "tests/runtime/test_layer_probes.py::"
            "test_a_layer_that_mixes_examples_is_named[whitening]",
        ),
    ),
    Fault(
        "a layer is not probed on a part of the batch",
        "tfgpipe/runtime/layer_probes.py",
        "mixes = not nearly_equal(part(outputs, first), of_half)",
        "mixes = not nearly_equal(of_half, of_half)",
        (
            "tests/runtime/test_layer_probes.py::"
            "test_a_layer_that_mixes_rows_is_named_in_a_warning[by their number]",
        ),
    ),
    Fault(
        "batch normalization inside a layer counts as mixing",
        "tfgpipe/runtime/traced_calls.py",
        '{"trainable": False}',
        "{}",
        (
            "tests/runtime/test_layer_probes.py::"
            "test_a_layer_that_keeps_examples_apart_gives_no_warning[batch norm]",
        ),
    ),
    Fault(
        "the last examples of a probe draw what the first drew",
        "tfgpipe/graph/eager_run.py",
        "[all_of - some if last else 0 for all_of, some in sizes]",
        "[0 for _ in sizes]",
        (
            "tests/graph/test_eager_run.py::"
            "test_draws_are_drawn_again_for_parts_of_a_batch",
        ),
    ),
    Fault(
        "a narrow weight has the columns of the wide one in another order",
        "tfgpipe/graph/eager_run.py",
        "tf.range(self.size) % NUM_COLUMNS",
        "tf.range(self.size) * NUM_COLUMNS // self.size",
        (
            "tests/graph/test_eager_run.py::"
            "test_a_narrow_weight_gives_what_the_whole_one_does",
        ),
    ),
)

STATE = (
    Fault(
        "after recut a model predicts with the variables that it had before",
        "tfgpipe/pipelined_layer.py",
        "            (model.predict_function, model.make_predict_function),\n",
        "",
        (
            "tests/models/test_pipelined_model.py::test_a_model_predicts_by_its_own_weights_after_it_was_recut",
        ),
    ),
    Fault(
        "a gradient passes through what a layer assigns to its weight",
        "tfgpipe/capture/scope.py",
        "update = variable, tf.grad_pass_through(lambda _: value)(current)",
        "update = variable, value",
        (
            "tests/models/test_layer_updates.py::test_three_steps_are_those_of_the_plain_model",
        ),
    ),
    Fault(
        "a weight is assigned once more by each microbatch",
        "tfgpipe/graph/joint_graph.py",
        "changed = self._changed(lambda x: x.is_floating or x.is_complex)",
        "changed = self._changed(lambda x: False)",
        (
            "tests/models/test_layer_updates.py::test_three_steps_are_those_of_the_plain_model",
        ),
    ),
    Fault(
        "what a layer that is recomputed assigns to its weight is lost",
        "tfgpipe/capture/interpreter.py",
        "for update in self.updates:",
        "for update in self.updates[:0]:",
        (
            "tests/models/test_layer_updates.py::test_three_steps_are_those_of_the_plain_model",
        ),
    ),
    Fault(
        "a layer's own metric is not carried",
        "tfgpipe/capture/interpreter.py",
        "(*x.variables, *keras_internals.layers.own_metrics(x))",
        "x.variables",
        (
            "tests/models/test_layer_updates.py::test_three_steps_are_those_of_the_plain_model",
        ),
    ),
    Fault(
        "an added sum over examples is averaged",
        "tfgpipe/runtime/executor.py",
        "return split.batch_fraction(m, dtype), has_rows",
        "return (split.batch_fraction(m, dtype),) * 2",
        (
            "tests/models/test_layer_updates.py::test_three_steps_are_those_of_the_plain_model",
        ),
    ),
    Fault(
        "a dry run forgets the branches that are specialized for a call",
        "tfgpipe/_compat/grappler.py",
        "result.library.function.extend(found.values())",
        "pass",
        (
            "tests/_compat/test_grappler.py::"
            "test_branches_that_are_specialized_for_a_call_are_there",
        ),
    ),
    Fault(
        "a search for schedules forgets the memory of backwards that have begun",
        "tfgpipe/simulation/shop.py",
        "all(held + begun <= limit for",
        "all(held <= limit for",
        (
            "tests/simulation/test_search.py::"
            "test_a_plan_finds_the_memory_that_the_search_has_found",
        ),
    ),
    Fault(
        "the bound of a schedule forgets the forwards that fill the wait",
        "tfgpipe/simulation/shop.py",
        "until + rest",
        "until + rest + forwards",
        ("tests/simulation/test_search.py::test_small_ones_are_the_best_of_all",),
    ),
    Fault(
        "the bound of a schedule forgets that memory is for few microbatches",
        "tfgpipe/simulation/shop.py",
        "max(busy, head + in_flight)",
        "busy",
        (
            "tests/simulation/test_search.py::"
            "test_no_more_are_in_flight_than_there_is_memory_for",
        ),
    ),
    Fault(
        "building blocks are not a period apart",
        "tfgpipe/simulation/building_blocks.py",
        "times[kind, k] + period * run.done[kind][k]",
        "times[kind, k] + 0 * run.done[kind][k]",
        ("tests/simulation/test_search.py::test_a_building_block_is_repeated",),
    ),
    Fault(
        "a plan counts all as recomputed that is saved where there is room",
        "tfgpipe/partition/plans.py",
        "[part * x for x in load.recomputed(k, len(layers))]",
        "[x for x in load.recomputed(k, len(layers))]",
        (
            "tests/partition/test_plans.py::"
            "test_auto_counts_the_part_that_there_is_no_room_for",
        ),
    ),
    Fault(
        "a comparison with plain Keras takes other slots than gradients",
        "tfgpipe/inspection/recorded_steps.py",
        "tuple(kept[part][0] for part in weight.parts)",
        "tuple(kept[part][-1] for part in weight.parts)",
        (
            "tests/inspection/test_verification.py::"
            "test_the_gradients_are_those_of_a_tape",
        ),
    ),
    Fault(
        "a comparison with plain Keras has its layers in shards as well",
        "tfgpipe/inspection/model_copies.py",
        'own["num_shards"] = 1',
        'own["num_shards"] += 0',
        (
            "tests/inspection/test_verification.py::"
            "test_shards_that_are_wrong_are_found",
        ),
    ),
    Fault(
        "replicas are compared with plain Keras that draws the same in each",
        "tfgpipe/inspection/recorded_steps.py",
        "seed.value + seed_offset(d, seed.value.dtype)",
        "seed.value + seed_offset(0, seed.value.dtype)",
        (
            "tests/inspection/test_verification.py::"
            "test_replicas_are_equal_to_their_microbatches[<lambda>0]",
        ),
    ),
    Fault(
        "the state of a microbatch is not handed on as layers are compared",
        "tfgpipe/inspection/causes.py",
        "results, before = one.run(piece, before)",
        "results, _ = one.run(piece, before)",
        (
            "tests/inspection/test_verification.py::"
            "test_statistics_that_end_alike_are_no_reason",
        ),
    ),
    Fault(
        "the loss that couples examples is taken of outputs in inference",
        "tfgpipe/runtime/coupled_losses.py",
        "self._outputs(inputs, schedule, training=True)",
        "self._outputs(inputs, schedule, training=False)",
        (
            "tests/models/test_coupled_losses.py::"
            "test_the_oracle_of_microbatches_says_the_same",
        ),
    ),
    Fault(
        "calls that change a variable are put into another order",
        "tfgpipe/capture/tracer.py",
        "            if latest.setdefault(variable, i) > i:\n",
        "            if latest.setdefault(variable, i) > len(calls):\n",
        ("tests/capture/test_order.py",),
    ),
    Fault(
        "a layer that is called on a constant is no longer trained, and none says so",
        "tfgpipe/capture/recording.py",
        "    if lacking:\n",
        "    if lacking and False:\n",
        (
            "tests/models/test_recorded_models.py::"
            "test_what_cannot_be_recorded_is_named",
        ),
    ),
    Fault(
        "a recorded model trains what it applies in inference",
        "tfgpipe/capture/recording.py",
        "    if not calls[None] == calls[True] == calls[False]:\n",
        "    if not calls[None] == calls[False]:\n",
        (
            "tests/models/test_recorded_models.py::"
            "test_what_cannot_be_recorded_is_named",
        ),
    ),
    Fault(
        "the examples of a loss's probe differ by chance alone",
        "tfgpipe/runtime/loss_probes.py",
        "return tf.cast(noise * growing, dtype)",
        "return tf.cast(noise, dtype)",
        (
            "tests/models/test_coupled_layers.py::"
            "test_beside_a_loss_of_the_model_that_couples_examples",
        ),
    ),
    Fault(
        "an added loss that couples examples has no gradient",
        "tfgpipe/runtime/loss_pipeline.py",
        "            grads=grads,\n",
        "            grads={},\n",
        (
            "tests/models/test_coupled_layers.py::"
            "test_the_balance_of_experts_is_that_of_the_mini_batch",
        ),
    ),
    Fault(
        "a cut is where examples have been put together already",
        "tfgpipe/graph/batch_cuts.py",
        "any(given) or len(_batch_axes(x, counterparts)) != 1",
        "len(_batch_axes(x, counterparts)) != 1",
        (
            "tests/models/test_coupled_layers.py::"
            "test_other_losses_that_couple_examples",
        ),
    ),
    Fault(
        "the loss of a cut is not compared with the loss",
        "tfgpipe/runtime/coupled_layers.py",
        'raise ValueError("the values of an example depend on others")',
        "pass",
        (
            "tests/models/test_coupled_layers.py::"
            "test_what_cannot_be_traced_back_is_said",
        ),
    ),
    Fault(
        "what the second sweep computes adds to a loss that couples examples",
        "tfgpipe/runtime/coupled_losses.py",
        "(y_pred - tf.stop_gradient(y_pred))",
        "y_pred",
        ("tests/models/test_coupled_losses.py::test_all_is_as_in_the_plain_model",),
    ),
    Fault(
        "a loss of each example is taken for a mean if it cannot be probed",
        "tfgpipe/runtime/layer_probes.py",
        "return shapes if shapes and all(shapes)",
        "return (False,) * len(shapes) if shapes and all(shapes)",
        (
            "tests/models/test_layer_updates.py::"
            "test_a_loss_of_each_example_counts_where_the_layer_cannot_be_probed",
        ),
    ),
    Fault(
        "the seed of a dropout does not advance from microbatch to microbatch",
        "tfgpipe/runtime/state.py",
        "if after in made and before not in trace.per_step_updates:",
        "if after in made and before not in trace.given.state:",
        ("tests/runtime/test_state.py::test_microbatches_draw_different_masks",),
    ),
    Fault(
        "the recomputation of a stage draws other masks than its forward",
        "tfgpipe/runtime/executor.py",
        "run.saved[m] = {**run.saved[m], **self._output_grads(k, m)}",
        "now = run.carry.values(m)\n            run.saved[m] = "
        "{**run.saved[m], **now, **self._output_grads(k, m)}",
        (
            "tests/runtime/test_state.py::"
            "test_the_gradient_flows_through_the_mask_that_the_output_shows",
        ),
    ),
    Fault(
        "the recomputation of a layer draws other masks than its forward",
        "tfgpipe/capture/interpreter.py",
        "TracingScope([*weight_values, *state_values], scope.replicas)",
        "TracingScope([*weight_values, *((v, scope.get_current_value(v)) "
        "for v in state)], scope.replicas)",
        (
            "tests/runtime/test_state.py::"
            "test_the_gradient_flows_through_the_mask_that_the_output_shows",
        ),
    ),
    Fault(
        "statistics of a layer that is recomputed move twice",
        "tfgpipe/capture/interpreter.py",
        "scope.accumulators.extend(self.accumulators)",
        "scope.accumulators.extend(2 * self.accumulators)",
        (
            "tests/stage/test_normalization.py::"
            "test_a_layer_called_twice_moves_its_averages_twice",
        ),
    ),
    Fault(
        "two threads take a layer for a subclass at once",
        "tfgpipe/_compat/keras_internals/substitution.py",
        "with _lock, contextlib.ExitStack() as restored:",
        "with contextlib.ExitStack() as restored:",
        ("tests/_compat/keras_internals/test_substitution.py",),
    ),
    Fault(
        "deferred moving averages move with each microbatch",
        "tfgpipe/stage/normalization.py",
        'if batch_norm == "deferred":\n            return',
        'if batch_norm == "defer":\n            return',
        (
            "tests/stage/test_normalization.py::test_converted_layers_do_as_deferred_ones",
        ),
    ),
    Fault(
        "the variance of a mini-batch leaves out how far microbatches are apart",
        "tfgpipe/stage/batch_moments.py",
        "squares + squares_of_more + tf.square(away) * count * share,",
        "squares + squares_of_more,",
        (
            "tests/stage/test_batch_moments.py::"
            "test_parts_of_any_size_give_the_moments_of_the_whole",
        ),
    ),
    Fault(
        "a layer called twice a step moves its averages once",
        "tfgpipe/runtime/state.py",
        "latest.get(v, self._initial_state.values[v])",
        "self._initial_state.values[v]",
        (
            "tests/stage/test_normalization.py::"
            "test_a_layer_called_twice_moves_its_averages_twice",
        ),
    ),
    Fault(
        "a microbatch without rows moves statistics",
        "tfgpipe/stage/empty_batches.py",
        "tf.cond(rows > 0, lambda: flat(compute), lambda: flat(skip))",
        "tf.cond(rows >= 0, lambda: flat(compute), lambda: flat(skip))",
        (
            "tests/runtime/test_state.py::test_an_unknown_batch_size_leaves_the_same_state",
        ),
    ),
    Fault(
        "a replica without rows keeps the averages that all move together",
        "tfgpipe/stage/empty_batches.py",
        "if fetch in trace.over_replicas:",
        "if fetch in ():",
        (
            "tests/distribution/test_stage_collectives.py::"
            "test_microbatches_are_normalised_over_replicas",
        ),
    ),
    Fault(
        "averages move where there are no rows",
        "tfgpipe/stage/batch_moments.py",
        "has_moments = merged[0] + self._epsilon > 0",
        "has_moments = merged[0] + self._epsilon >= 0",
        (
            "tests/stage/test_batch_moments.py::"
            "test_averages_stay_where_there_are_no_rows",
        ),
    ),
    Fault(
        "a metric of one replica is taken",
        "tfgpipe/distribution/stage_strategy.py",
        "return len(self.copies(variable.value)) == 1 < self.mesh.num_replicas",
        "return len(self.copies(variable.value)) == 0 < self.mesh.num_replicas",
        (
            "tests/distribution/test_losses_and_metrics.py::"
            "test_a_metric_of_one_replica_is_refused_by_name",
        ),
    ),
    Fault(
        "replicas drop the same units",
        "tfgpipe/distribution/replicas.py",
        "offset = tf.cast(replica, tf.int64) * _SEED_STRIDE % 2**31",
        "offset = tf.cast(0, tf.int64) * _SEED_STRIDE % 2**31",
        ("tests/distribution/test_data_parallel.py::test_replicas_drop_other_units",),
    ),
    Fault(
        "a mask is lost between stages",
        "tfgpipe/capture/interpreter.py",
        "mask = keras_calls.get_mask(values[i])\n",
        "mask = None\n",
        (
            "tests/models/test_models.py::"
            "test_masks_go_from_the_stage_that_makes_them_to_those_that_read_them",
        ),
    ),
    Fault(
        "a pipeline predicts as if it trained",
        "tfgpipe/pipelined_model.py",
        "return self.pipelined(inputs, training=training, mask=mask)",
        "return self.pipelined(inputs, training=True, mask=mask)",
        (
            "tests/runtime/test_state.py::"
            "test_prediction_and_evaluation_drop_nothing_and_move_nothing",
        ),
    ),
    Fault(
        "a pipeline evaluates as if it trained",
        "tfgpipe/runtime/loss_pipeline.py",
        "inputs, targets, weights, schedule, returned, training=False",
        "inputs, targets, weights, schedule, returned, training=True",
        (
            "tests/runtime/test_state.py::"
            "test_prediction_and_evaluation_drop_nothing_and_move_nothing",
        ),
    ),
    Fault(
        "a layer that is frozen goes on as it was traced",
        "tfgpipe/stage/stage.py",
        "key = (request, tuple(map(id, own)), frozen)",
        "key = (request, tuple(map(id, own)))",
        (
            "tests/runtime/test_state.py::"
            "test_freezing_a_layer_without_weights_of_its_own_is_noticed",
        ),
    ),
    Fault(
        "a model that is frozen is trained once it comes from a file",
        "tfgpipe/pipelined_model.py",
        '            "trainable": self.trainable,\n',
        "",
        ("tests/models/test_saved_arguments.py",),
    ),
    Fault(
        "a file forgets what a sharded normalization adds to the variance",
        "tfgpipe/tensor_parallel/normalization.py",
        '*("epsilon", "center", "scale", "gather_output"),',
        '*("center", "scale", "gather_output"),',
        ("tests/models/test_saved_arguments.py",),
    ),
)

DEVICES = (
    Fault(
        "with more workers than stages some in between are left out",
        "tfgpipe/devices/mesh.py",
        "worker = k * min(len(workers), num_stages) // num_stages",
        "worker = k * len(workers) // num_stages",
        (
            "tests/devices/test_mesh.py::test_workers_beyond_the_number_of_stages_are_left_over",
        ),
    ),
    Fault(
        "an optimizer keeps slots on one device",
        "tfgpipe/distribution/optimizer.py",
        "return current_strategy().slot_scope(variable)",
        "return contextlib.nullcontext()",
        (
            "tests/distribution/test_placement.py::"
            "test_weights_slots_and_updates_are_on_their_stages_device",
        ),
    ),
    Fault(
        "weights of all stages are on the first one's device",
        "tfgpipe/distribution/single_replica.py",
        "return tf.device(self._mesh.shard_devices(0, k)[shard])",
        "return tf.device(self._mesh.shard_devices(0, 0)[shard])",
        (
            "tests/distribution/test_placement.py::"
            "test_weights_slots_and_updates_are_on_their_stages_device",
        ),
    ),
    Fault(
        "the actions of a device have no order",
        "tfgpipe/runtime/executor.py",
        "self._last[device] = [results[0].op]",
        "self._last[device] = []",
        (
            "tests/runtime/test_pipeline.py::"
            "test_actions_of_a_device_are_chained_and_devices_are_not",
        ),
    ),
    Fault(
        "gradients are final after the first backward of a stage",
        "tfgpipe/schedules/schedule.py",
        "a.stage: a for order in self.orders for a in order if a.kind.adds_gradients",
        "a.stage: a for o in self.orders for a in o[::-1] if a.kind.adds_gradients",
        (
            "tests/schedules/test_schedule.py::"
            "test_the_last_action_that_adds_gradients_is_known",
        ),
    ),
    Fault(
        "a second gradient of a persistent tape draws other random numbers",
        "tfgpipe/runtime/differentiable.py",
        "executor = Executor(step)",
        "executor = Executor(self.begin(given))",
        (
            "tests/models/test_gradient_identity.py::"
            "test_a_gradient_called_twice_is_the_same_twice",
        ),
    ),
    Fault(
        "an eager gradient frees nothing of what it has used",
        "tfgpipe/runtime/differentiable.py",
        "frees = tf.executing_eagerly() and not self.step.has_side_effects",
        "frees = False",
        (
            "tests/runtime/test_memory.py::"
            "test_an_eager_gradient_frees_each_microbatch_that_it_has_used",
        ),
    ),
    Fault(
        "masks of outputs are those of training in evaluation",
        "tfgpipe/stage/output_masks.py",
        "key = (training, *specs.items())",
        "key = tuple(specs.items())",
        (
            "tests/stage/test_output_masks.py::"
            "test_masks_may_be_others_in_training_than_in_evaluation",
        ),
    ),
    Fault(
        "masks that alike stages take off are those of the first",
        "tfgpipe/stage/stage.py",
        "        stage.dropped_masks = tuple(ids[value_id] for value_id in "
        "self.dropped_masks)\n",
        "",
        (
            "tests/stage/test_output_masks.py::"
            "test_alike_stages_may_take_masks_off_their_inputs",
        ),
    ),
    Fault(
        "rematerialisation keeps all activations",
        "tfgpipe/remat/policy.py",
        "return self.keeps_all",
        "return True",
        (
            "tests/models/test_other_libraries.py::test_just_so_many_microbatches_are_recomputed",
        ),
    ),
    Fault(
        "the first microbatch is kept in place of the last",
        "tfgpipe/remat/except_last.py",
        "is_last = m == schedule.num_microbatches - 1",
        "is_last = m == 0",
        (
            "tests/models/test_other_libraries.py::test_just_so_many_microbatches_are_recomputed",
        ),
    ),
    Fault(
        "a random operation is run once a step, not for each microbatch",
        "tfgpipe/graph/partitioner.py",
        "if not behind or name in stateful:",
        "if not behind:",
        (
            "tests/graph/test_partitioner.py::"
            "test_nothing_lasts_that_may_be_something_else_each_time",
        ),
    ),
    Fault(
        "integers are compressed between stages",
        "tfgpipe/stage/boundary.py",
        "if value_id in self.uncompressed or not is_floating:",
        "if value_id in self.uncompressed:",
        (
            "tests/stage/test_boundary.py::test_only_floats_that_get_smaller_are_compressed",
        ),
    ),
    Fault(
        "gradients are not compressed on their way back",
        "tfgpipe/stage/codecs/cast.py",
        "return self._half(gradient)",
        "return gradient",
        (
            "tests/stage/test_boundary.py::"
            "test_what_crosses_is_the_compressed_value_and_gradient",
        ),
    ),
    Fault(
        "values in 8 bits have one scale for all examples",
        "tfgpipe/stage/codecs/int8.py",
        "return range(1, rank)",
        "return range(rank)",
        (
            "tests/stage/test_boundary.py::test_steps_are_of_each_example_or_each_channel",
        ),
    ),
    Fault(
        "a new partition leaves the optimizer's slots behind",
        "tfgpipe/pipelined_layer.py",
        "self._place(stage, variables, optimizer)\n        self._calls_per_stage",
        "self._place(stage, [], optimizer)\n        self._calls_per_stage",
        (
            "tests/models/test_pipelined_placement.py::"
            "test_a_new_cut_changes_nothing_but_where_things_are",
        ),
    ),
    Fault(
        "a torus along one axis of TPU chips is one along all",
        "tfgpipe/devices/tpu_topology.py",
        "        if around:\n",
        "        if any(torus):\n",
        (
            "tests/devices/test_tpu_topology.py::"
            "test_neighbours_are_a_step_apart_along_one_axis_around_it_where_it_is_a_torus",
        ),
    ),
    Fault(
        "TPU chips are neighbours along a diagonal",
        "tfgpipe/devices/tpu_topology.py",
        "return sum(steps) <= 1",
        "return max(steps) <= 1",
        (
            "tests/devices/test_tpu_topology.py::"
            "test_neighbours_are_a_step_apart_along_one_axis_around_it_where_it_is_a_torus",
        ),
    ),
)

REPLICAS = (
    Fault(
        "gradients of replicas are averaged, not summed",
        "tfgpipe/distribution/all_reduce.py",
        "return tf.add_n([tf.identity(x) for x in tensors])",
        "return tf.add_n([tf.identity(x) for x in tensors]) / len(tensors)",
        ("tests/distribution/test_all_reduce.py::test_each_device_gets_the_same_sum",),
    ),
    Fault(
        "the ring of replicas stops one device early",
        "tfgpipe/distribution/all_reduce.py",
        "for step in range(D, 2 * D - 1):",
        "for step in range(D, 2 * D - 2):",
        ("tests/distribution/test_all_reduce.py::test_each_device_gets_the_same_sum",),
    ),
    Fault(
        "all replicas' updates go to the first one's weights",
        "tfgpipe/distribution/replica_update.py",
        "IdentityMap((v, x[d]) for v, x in self._copies.items())",
        "IdentityMap((v, x[0]) for v, x in self._copies.items())",
        ("tests/distribution/test_data_parallel.py::test_a_loop_of_ones_own",),
    ),
    Fault(
        "the replica that owns most bytes is given more",
        "tfgpipe/distribution/zero.py",
        "owner = held.index(min(held))",
        "owner = held.index(max(held))",
        (
            "tests/distribution/test_zero_shares.py::"
            "test_no_device_holds_more_than_another_by_more_than_one_thing",
        ),
    ),
    Fault(
        "the statistics of replicas without rows count",
        "tfgpipe/distribution/stage_collectives.py",
        "return summed(tensor * present)",
        "return summed(tensor)",
        (
            "tests/distribution/test_stage_collectives.py::test_microbatches_are_normalised_over_replicas",
        ),
    ),
    Fault(
        "chunks on the tensor-parallel ring meet their neighbour's rows",
        "tfgpipe/tensor_parallel/ring.py",
        "kernel = kernels[t][(t - s * step) % T]",
        "kernel = kernels[t][(t - (s - 1) * step) % T]",
        (
            "tests/tensor_parallel/test_ring.py::"
            "test_chunks_of_any_size_make_the_product",
        ),
    ),
    Fault(
        "sums on the tensor-parallel ring end one device too far",
        "tfgpipe/tensor_parallel/ring.py",
        "onward[(t + step) % T if s < T - 1 else t] = [total]",
        "onward[(t + step) % T] = [total]",
        (
            "tests/tensor_parallel/test_ring.py::"
            "test_sums_that_go_round_are_the_product",
        ),
    ),
    Fault(
        "the heads of all shards drop what those of the first do",
        "tfgpipe/tensor_parallel/attention.py",
        "first=shard * self.num_heads // self.num_shards,",
        "first=0,",
        (
            "tests/tensor_parallel/test_identity.py::"
            "test_outputs_and_gradients_are_those_without_shards"
            "[attention-3-sync-False]",
        ),
    ),
    Fault(
        "a draw for some heads begins with a step of the generator",
        "tfgpipe/tensor_parallel/head_dropout.py",
        "tf.cast(start % size",
        "tf.cast(start % 1",
        ("tests/tensor_parallel/test_head_dropout.py",),
    ),
    Fault(
        "updates of a weight's owner do not reach the other replicas",
        "tfgpipe/distribution/replica_update.py",
        "copy.assign(updated[variable])",
        "updated[variable].assign(copy)",
        (
            "tests/distribution/test_zero.py::"
            "test_optimizers_work_on_what_all_replicas_sum_up_to"
            "[scaled with slots shared out]",
        ),
    ),
    Fault(
        "recomputation by layer normalises each replica on its own",
        "tfgpipe/capture/interpreter.py",
        "inner = TracingScope([*weight_values, *state_values], scope.replicas)",
        "inner = TracingScope([*weight_values, *state_values], None)",
        (
            "tests/distribution/test_stage_collectives.py::"
            "test_microbatches_are_normalised_over_replicas",
        ),
    ),
    Fault(
        "the largest logit of the first shard stands for that of all",
        "tfgpipe/tensor_parallel/cross_entropy.py",
        "lambda *m: tf.reduce_max(m, axis=0), *maxima",
        "lambda *m: m[0], *maxima",
        (
            "tests/tensor_parallel/test_layers.py::"
            "test_logits_of_any_shard_may_be_large",
        ),
    ),
)

QUANTIZATION = (
    Fault(
        "masks of weight ranges that each microbatch moves wait for the end of a step",
        "tfgpipe/graph/passes/weight_masks.py",
        "if any(map(joint.is_source, needed.operations)):",
        "if not needed:",
        (
            "tests/quantization/test_identity.py::test_each_microbatch_masks_"
            "gradients_by_the_weight_range_that_it_has_moved",
        ),
    ),
    Fault(
        "a microbatch is quantized with the range that it has moved",
        "tfgpipe/quantization/fake_quant.py",
        'if self._is_weight or context.schedule.range_update == "per_call":',
        "if self._is_weight or context.updates_ranges:",
        (
            "tests/quantization/test_wrapper.py::"
            "test_per_step_quantizes_with_the_range_before_and_per_call_after",
        ),
    ),
    Fault(
        "compilers may make a product of a division by the number of levels",
        "tfgpipe/graph/passes/fake_quant_on_device.py",
        "(high - low) / tf.where(tf.equal(high, low), 1.0, last - first)",
        "(high - low) / (last - first)",
        ("tests/graph/passes/test_fake_quant_on_device.py",),
    ),
    Fault(
        "a range moves by the last microbatch alone",
        "tfgpipe/quantization/fake_quant.py",
        "return [tf.maximum(previous[0], self.values[0])]",
        "return [self.values[0]]",
        (
            "tests/quantization/test_identity.py::"
            "test_eight_microbatches_recomputed_equal_one_kept",
        ),
    ),
    Fault(
        "a narrow range has a level too many",
        "tfgpipe/quantization/ranges.py",
        "ratio = -1 if self.narrow_range else -(levels - 2) / levels",
        "ratio = -(levels - 2) / levels",
        ("tests/quantization/test_ranges.py::test_what_is_seen_holds_zero",),
    ),
    Fault(
        "a range is frozen one step too late",
        "tfgpipe/quantization/fake_quant.py",
        "counts = tf.logical_and(counts, count < freeze_after)",
        "counts = tf.logical_and(counts, count <= freeze_after)",
        ("tests/quantization/test_wrapper.py::test_ranges_stay_once_they_are_frozen",),
    ),
    Fault(
        "a tensor that is not finite moves a range",
        "tfgpipe/quantization/fake_quant.py",
        "finite = [tf.reduce_all(tf.math.is_finite(end)) for end in observed]",
        "finite = [tf.constant(True) for end in observed]",
        ("tests/quantization/test_wrapper.py::test_what_is_not_finite_moves_no_range",),
    ),
    Fault(
        "a model that has seen no range is exported",
        "tfgpipe/quantization/export.py",
        "    _check_ranges(copy, calibrated=representative is not None)\n",
        "",
        (
            "tests/quantization/test_export.py::test_a_model_that_has_seen_no_range_is_refused",
        ),
    ),
    Fault(
        "quantizing begins one step after its delay",
        "tfgpipe/quantization/fake_quant.py",
        "return tf.where(self._count >= self.schedule.delay, quantized, x)",
        "return tf.where(self._count > self.schedule.delay, quantized, x)",
        (
            "tests/quantization/test_wrapper.py::"
            "test_until_the_delay_is_over_ranges_are_only_observed",
        ),
    ),
    Fault(
        "an output that a layer of the model reads as well is fused away",
        "tfgpipe/quantization/scheme.py",
        "if num_readers[n] > 1 or n in outputs or not (other and may_fuse(other)):",
        "if num_readers[n] > 1 or not (other and may_fuse(other)):",
        (
            "tests/quantization/test_scheme.py::"
            "test_what_is_an_output_as_well_is_not_fused",
        ),
    ),
)

TRAINER = (
    Fault(
        "ranges are frozen where rounding was to begin, which begins at once",
        "params/image/__init__.py",
        'Precision(quantize="8bit", quantize_start_step=100)',
        'Precision(quantize="8bit", freeze_ranges_step=100)',
        (
            "tests/params/test_image.py::test_a_network_for_int8_first_trains_in_floats_and_then_rounds",
        ),
    ),
    Fault(
        "a network on images of folders has ten classes, however many folders",
        "params/variants.py",
        "layers.Dense(self.data.num_classes),",
        "layers.Dense(self.data.classes or 10),",
        (
            "tests/params/test_image.py::test_a_network_of_ones_own_tells_as_many_classes_as_there_are",
        ),
    ),
    Fault(
        "a memory limit in GiB is taken for one in GB",
        "trainer/config.py",
        '"memory_limit": None if limit is None else limit * 2**30,',
        '"memory_limit": None if limit is None else limit * 10**9,',
        ("tests/params/test_image.py::test_a_limit_of_memory_is_in_gib",),
    ),
    Fault(
        "the names in a checkpoint depend on the pipeline around a layer",
        "trainer/checkpoint/variable_names.py",
        "kept = [path if is_seed(path[0]) else path[enclosing:] for path in paths]",
        "kept = [path if is_seed(path[0]) else path[:] for path in paths]",
        (
            "tests/trainer/test_variable_names.py::test_names_are_those_of_the_layers_in_any_cut",
        ),
    ),
    Fault(
        "a run that goes on repeats a batch",
        "trainer/train.py",
        '"train", first_step=first_step, shard=shard',
        '"train", first_step=max(first_step - 1, 0), shard=shard',
        ("tests/trainer/test_preemption.py::test_a_stopped_run_goes_on_exactly",),
    ),
    Fault(
        "the worst checkpoint is kept as the best",
        "trainer/callbacks.py",
        'sign = 1 if self._mode == "min" else -1',
        'sign = -1 if self._mode == "min" else 1',
        (
            "tests/trainer/test_modes.py::"
            "test_the_metric_says_which_checkpoint_is_the_best",
        ),
    ),
    Fault(
        "the newest checkpoints are removed, and the oldest stay",
        "trainer/checkpoint/store.py",
        "staying = {*ordered[-keep:], best}",
        "staying = {*ordered[:keep], best}",
        ("tests/trainer/test_store_files.py::test_the_last_and_the_best_always_stay",),
    ),
    Fault(
        "a checkpoint is written before its step is known to be finite",
        "trainer/callbacks.py",
        "        if ends:\n            self._hand_over()\n",
        "        self._hand_over()\n        if ends:\n",
        (
            "tests/trainer/test_finiteness.py::"
            "test_a_run_that_diverges_keeps_what_was_good",
        ),
    ),
    Fault(
        "the measurement at the step of a checkpoint is dropped",
        "trainer/writers.py",
        'if record["step"] <= step\n',
        'if record["step"] < step\n',
        (
            "tests/trainer/test_main.py::"
            "test_measurements_of_steps_to_be_done_again_are_dropped",
        ),
    ),
    Fault(
        "an update is made though some gradients are not finite",
        "trainer/optimizers.py",
        "tf.cond(tf.reduce_all(finite), update, leave_out)",
        "tf.cond(tf.reduce_any(finite), update, leave_out)",
        (
            "tests/trainer/test_variable_names.py::"
            "test_a_guarded_optimizer_leaves_out_what_is_not_finite",
        ),
    ),
    Fault(
        "every epoch has the order of the files",
        "trainer/batches.py",
        "range(len(self)).seed(seed).shuffle()",
        "range(len(self)).seed(seed)",
        (
            "tests/trainer/test_batches.py::"
            "test_seeds_and_epochs_have_orders_of_their_own",
        ),
    ),
    Fault(
        "validation leaves examples out that nobody has asked it to",
        "trainer/batches.py",
        "    count = num_examples\n",
        "    count = min(num_examples, 32 * batch_size)\n",
        (
            "tests/trainer/test_batch_rows.py::"
            "test_validation_has_all_examples_unless_fewer_are_asked_for",
        ),
    ),
    Fault(
        "hosts read rows that overlap",
        "trainer/batches.py",
        "return slice(self.index * size, (self.index + 1) * size)",
        "return slice(self.index, self.index + size)",
        ("tests/trainer/test_batch_rows.py::test_hosts_share_a_batch_out",),
    ),
    Fault(
        "packed windows lose the last byte of a long document's pieces",
        "params/lm/corpus.py",
        "for first in range(0, len(document), room)",
        "for first in range(0, len(document), size)",
        ("tests/trainer/test_packing.py::test_every_byte_is_there_once",),
    ),
    Fault(
        "the tokens of one text are taken for those of another",
        "params/lm/token_cache.py",
        "self._hash.update(part)",
        "self._hash.update(part[:1])",
        (
            "tests/trainer/test_token_cache.py::"
            "test_another_text_or_version_is_encoded_anew",
        ),
    ),
    Fault(
        "bytes that are no UTF-8 come before the text before them",
        "params/lm/tokenizers.py",
        "ids = [*ids, *(self.byte_ids[byte] for byte in received), *next(encoded)]",
        "ids = [*(self.byte_ids[byte] for byte in received), *ids, *next(encoded)]",
        ("tests/trainer/test_tokenizers.py::test_every_text_comes_back",),
    ),
    Fault(
        "bigrams between two blocks are not counted",
        "params/lm/task.py",
        "block = text[first : first + _BLOCK + 1]",
        "block = text[first : first + _BLOCK]",
        (
            "tests/trainer/test_corpus_files.py::"
            "test_the_bigram_model_is_that_of_the_whole_table",
        ),
    ),
    Fault(
        "a learning rate falls during its warm-up",
        "trainer/optimizers.py",
        "passed = keras.ops.maximum(number - self.num_steps, 0.0)",
        "passed = number",
        ("tests/trainer/test_optimizers.py::test_a_schedule_is_its_formula",),
    ),
    Fault(
        "scales and offsets of norms are decayed",
        "trainer/optimizers.py",
        "matrix = len(v.shape) > 1 and",
        "matrix = len(v.shape) > 0 and",
        ("tests/trainer/test_optimizers.py::test_only_matrices_decay",),
    ),
    Fault(
        "groups of weights have the learning rate of all",
        "trainer/optimizers.py",
        "learning_rate = learning_rate * self.learning_rate_factor(weight)",
        "pass",
        (
            "tests/trainer/test_groups.py::"
            "test_a_group_is_updated_as_by_an_optimizer_of_its_own",
        ),
    ),
    Fault(
        "groups of weights decay by the learning rate of all",
        "tfgpipe/_compat/keras_internals/optimizers.py",
        "scaled = own.learning_rate * factor",
        "scaled = own.learning_rate",
        (
            "tests/trainer/test_groups.py::"
            "test_a_group_is_updated_as_by_an_optimizer_of_its_own",
        ),
    ),
    Fault(
        "the harness scores a continuation without its last token",
        "params/lm/harness.py",
        "targets = after[-len(logits) :]",
        "targets = after[-len(logits) : -1]",
        (
            "tests/params/test_harness.py::"
            "test_texts_longer_than_a_window_are_scored_whole",
        ),
    ),
    Fault(
        "of packed documents id 0 is left out of the loss, not the start",
        "params/lm/task.py",
        "from_logits=True, ignore_class=self._start",
        "from_logits=True, ignore_class=None if self._start is None else 0",
        (
            "tests/params/test_lm.py::"
            "test_the_start_of_a_packed_document_is_left_out_of_the_loss",
        ),
    ),
    Fault(
        "integers of a wide type are divided by the largest of it",
        "params/image/sources.py",
        "full = 65535 if pixels.dtype.type is np.uint16 else 255",
        "full = np.iinfo(pixels.dtype).max",
        ("tests/trainer/test_sources.py::test_wide_integers_are_those_of_a_byte",),
    ),
    Fault(
        "a baseline takes the place of a measurement of its name",
        "trainer/train.py",
        "{**baselines, **last}",
        "{**last, **baselines}",
        (
            "tests/params/test_template.py::"
            "test_a_baseline_does_not_take_the_place_of_what_is_measured",
        ),
    ),
    Fault(
        "labels with fractions are cut to integers",
        "trainer/validate_data.py",
        "    return batches.map(check)",
        "    return batches",
        (
            "tests/params/test_template.py::"
            "test_data_of_training_are_looked_at_as_they_come",
        ),
    ),
    Fault(
        "a default of a base class other than the first is lost",
        "trainer/hyperparams.py",
        "for each in cls.__mro__ if name in vars(each))",
        "for each in cls.__mro__[::-1] if name in vars(each))",
        (
            "tests/trainer/test_hyperparams.py::"
            "test_defaults_come_from_all_base_classes_as_attributes_do",
        ),
    ),
    Fault(
        "a warm start takes the lower half of a network for the upper",
        "trainer/checkpoint/warm_start.py",
        "if here != there and any(",
        "if here == there and any(",
        (
            "tests/trainer/test_warm_start.py::"
            "test_the_upper_half_of_a_network_is_not_taken_for_the_lower",
        ),
    ),
    Fault(
        "gradients of two steps are not accumulated",
        "trainer/config.py",
        "if self.gradient_accumulation_steps > 1:",
        "if self.gradient_accumulation_steps > 2:",
        (
            "tests/trainer/test_optimizers.py::"
            "test_updates_are_made_of_several_steps_and_schedules_count_all",
        ),
    ),
    Fault(
        "a hyperparameter takes true for an int",
        "trainer/hyperparams.py",
        "    if type(value) is not kind:\n",
        "    if not isinstance(value, kind):\n",
        (
            "tests/trainer/test_hyperparams.py::test_values_are_checked_when_an_object_is_made",
        ),
    ),
    Fault(
        "a hyperparameter may be what it is to be less than",
        "trainer/hyperparams.py",
        "limit is not None and value >= limit",
        "limit is not None and value > limit",
        ("tests/trainer/test_hyperparams.py::test_a_number_is_within_its_bounds",),
    ),
    Fault(
        "averaged weights stay in place of those that are trained",
        "trainer/checkpoint/variable_names.py",
        "            weight.assign(value)\n",
        "            weight.assign(weight)\n",
        (
            "tests/trainer/test_variable_names.py::"
            "test_averages_are_shown_and_taken_back_exactly",
        ),
    ),
    Fault(
        "documents are packed where most room is left",
        "params/lm/corpus.py",
        "room = length + (fitting & -fitting).bit_length() - 1  # The least.",
        "room = length + fitting.bit_length() - 1  # The least.",
        (
            "tests/trainer/test_packing.py::"
            "test_the_longest_come_first_each_where_it_leaves_least_room",
        ),
    ),
    Fault(
        "the template validates on the points that it trains on",
        "params/template.py",
        'np.random.default_rng(["train", "validation"].index(split))',
        "np.random.default_rng(0)",
        ("tests/params/test_template.py::test_no_point_of_validation_is_trained_on",),
    ),
    Fault(
        "all three ways to spread a model are but two",
        "params/parallelism.py",
        "PipelinedDataParallel.pipelining.replace(num_shards=2)",
        "Pipelined.pipelining.replace(num_shards=2)",
        (
            "tests/params/test_parallelism.py::"
            "test_an_experiment_has_the_replicas_stages_and_shards_that_it_says",
        ),
    ),
    Fault(
        "a medium language model has the stages of the small one",
        "params/lm/__init__.py",
        "Small.pipelining.replace(num_stages=8, num_microbatches=32)",
        "Small.pipelining.replace(num_microbatches=32)",
        (
            "tests/params/test_lm.py::"
            "test_a_large_model_has_the_weights_and_the_stages_that_it_says",
        ),
    ),
    Fault(
        "a language model of a billion weights has the layers of the small one",
        "params/lm/__init__.py",
        "Medium.model.replace(width=1920, num_heads=15, mlp_width=7680)",
        "Small.model.replace(width=1920, num_heads=15, mlp_width=7680)",
        (
            "tests/params/test_lm.py::"
            "test_a_large_model_has_the_weights_and_the_stages_that_it_says",
        ),
    ),
)

CLUSTER = (
    Fault(
        "a process that hangs is waited for without end",
        "tfgpipe/cluster/processes.py",
        "max_silence=health.SILENCE_SECONDS,",
        "max_silence=1e9,",
        ("tests/cluster/test_peers.py::test_when_one_hangs_the_others_end",),
    ),
    Fault(
        "a process that fails says good-bye as one that is done",
        "tfgpipe/cluster/peers.py",
        "clean = error.code in (None, 0)",
        "clean = True",
        ("tests/cluster/test_peers.py::test_when_one_fails_the_others_end_at_once",),
    ),
    Fault(
        "a second process takes the place of one that is there",
        "tfgpipe/cluster/processes.py",
        "if not reason and str(other) in status.clients:",
        "if not reason and not status.clients:",
        (
            "tests/cluster/test_peers.py::"
            "test_a_process_is_not_taken_for_another_and_may_come_again",
        ),
    ),
    Fault(
        "state of a metric that the first process alone has is that of all",
        "tfgpipe/distribution/process_group.py",
        '"only_first_replica": float(self.index == 0),',
        '"only_first_replica": 1.0,',
        (
            "tests/distribution/test_process_group.py::"
            "test_state_is_combined_as_its_variables_say",
        ),
    ),
    Fault(
        "a maximum over replicas is the sum of their maxima",
        "tfgpipe/runtime/loss_pipeline.py",
        "compiled, targets, shapes, num_replicas=num_replicas",
        "compiled, targets, shapes",
        (
            "tests/distribution/test_data_parallel.py::"
            "test_metrics_that_replicas_cannot_share_are_refused",
        ),
    ),
    Fault(
        "a command is started again once too often",
        "tfgpipe/cluster/supervisor.py",
        "if restarts == most:",
        "if restarts > most:",
        ("tests/cluster/test_supervisor.py::test_restarts_are_limited",),
    ),
    Fault(
        "waits between restarts do not grow",
        "tfgpipe/cluster/supervisor.py",
        "in_a_row = 1 if self._good.is_over else in_a_row + 1",
        "in_a_row = 1 if not self._good.is_over else in_a_row + 1",
        ("tests/cluster/test_supervisor.py::test_waits_begin_anew_after_a_good_start",),
    ),
    Fault(
        "another host may call a server before its port is closed to it",
        "tfgpipe/cluster/server.py",
        "if not caller.is_loopback:",
        "if caller.is_multicast:",
        (
            "tests/cluster/test_peers.py::"
            "test_a_host_that_calls_before_the_port_is_closed_to_it_is_refused",
        ),
    ),
    Fault(
        "any token opens a worker",
        "tfgpipe/cluster/addresses.py",
        "return not own or hmac.compare_digest(encoded, own.encode())",
        "return not own or bool(other)",
        (
            "tests/cluster/test_worker.py::test_a_session_takes_the_token_of_the_cluster",
            "tests/cluster/test_peers.py::test_processes_of_another_token_are_refused",
        ),
    ),
)

BY_NUMBERS = (
    Fault(
        "weights count as saved tensors",
        "tfgpipe/costs/profiler.py",
        "given = (*trace.given.inputs, *trace.given.weights)",
        "given = tuple(trace.given.inputs)",
        (
            "tests/partition/test_plans.py::test_a_weight_that_is_passed_on_is_not_saved",
        ),
    ),
    Fault(
        "a microbatch is planned with the rows of the smallest",
        "tfgpipe/partition/plans.py",
        "rows = math.ceil(batch / num_microbatches)",
        "rows = max(1, batch // num_microbatches)",
        (
            "tests/partition/test_plans.py::test_the_plan_of_a_pipeline_is_that_of_its_cut",
        ),
    ),
    Fault(
        "the cost of a stage leaves out recomputation",
        "tfgpipe/partition/balances.py",
        "sum(map(self.layer_cost, layers)) + sum(n * cost for n, cost in again)",
        "sum(map(self.layer_cost, layers))",
        (
            "tests/partition/test_balances.py::"
            "test_what_the_solver_takes_is_the_cost_of_each_stage",
        ),
    ),
    Fault(
        "stages are partitioned as if recomputation added up over their layers",
        "tfgpipe/partition/balances.py",
        "if is_additive and len({*speeds}) == 1:",
        "if True:",
        (
            "tests/partition/test_balances.py::"
            "test_what_the_solver_takes_is_the_cost_of_each_stage",
        ),
    ),
    Fault(
        "stages of slow devices are cut as those of fast ones",
        "tfgpipe/partition/balances.py",
        "return work / key[0]",
        "return work",
        (
            "tests/partition/test_unequal_devices.py::"
            "test_no_other_cut_is_better_for_the_speeds",
        ),
    ),
    Fault(
        "stages of small devices are cut as those of large ones",
        "tfgpipe/partition/profiles.py",
        "return np.max(held.total, axis=0) + key[0]",
        "return np.max(held.total, axis=0)",
        ("tests/partition/test_unequal_devices.py::test_each_device_has_its_limit",),
    ),
    Fault(
        "the fullest device is the one that holds most, whatever it has",
        "tfgpipe/planner/plan_request.py",
        "return float(held.total - device.memory)",
        "return float(held.total)",
        (
            "tests/planner/test_several_kinds.py::"
            "test_the_smaller_devices_decide_what_fits",
        ),
    ),
    Fault(
        "a trial teaches nothing of the backwards of its layers",
        "tfgpipe/planner/settings.py",
        "factors += [(forward, backward)] * num_calls",
        "factors += [(forward, 1.0)] * num_calls",
        (
            "tests/planner/test_tuning.py::"
            "test_it_ends_at_the_fastest_setting_of_a_machine_it_did_not_know",
        ),
    ),
    Fault(
        "plans by FLOPs may be as far from the best as plans by time",
        "tfgpipe/partition/balances.py",
        "slack: ClassVar[float] = 0.0",
        "slack: ClassVar[float] = 0.005",
        (
            "tests/partition/test_profiles.py::"
            "test_only_measured_times_may_be_a_little_worse_for_fewer_bytes",
        ),
    ),
    Fault(
        "a window of attention has a position more, one position at a time",
        "tfgpipe/_compat/keras_internals/attention.py",
        "visible &= distance < window",
        "visible &= distance <= window",
        (
            "tests/_compat/keras_internals/test_attention.py",
            "tests/models/test_generation.py",
        ),
    ),
    Fault(
        "a token that was given is generated",
        "tfgpipe/runtime/generation.py",
        "new = tf.where(is_given, tf.gather(tokens, index, axis=1), new)",
        "",
        ("tests/models/test_generation.py",),
    ),
    Fault(
        "a stop in a prompt ends its example",
        "tfgpipe/runtime/generation.py",
        "ended |= (new == stop) & ~is_given",
        "ended |= new == stop",
        ("tests/models/test_generation.py",),
    ),
    Fault(
        "a token is chosen by the first position that was computed",
        "tfgpipe/runtime/generation.py",
        "decoder.step(tokens[span], cache, index - 1)",
        "decoder.step(tokens[span], cache, index)",
        ("tests/models/test_generation.py",),
    ),
    Fault(
        "a renamed layer gives the first of its weights alone",
        "trainer/checkpoint/warm_start.py",
        "called = [name for name in found if name.startswith(old)]",
        "called = [name for name in found if name.startswith(old)][:1]",
        (
            "tests/trainer/test_warm_start.py::test_weights_may_be_called_otherwise_there",
        ),
    ),
    Fault(
        "a copy on another device shares the buffer",
        "tfgpipe/graph/peak_memory.py",
        "            if tensor.op.device != tensor.op.inputs[0].op.device:\n"
        "                break\n",
        "",
        (
            "tests/graph/test_peak_memory.py::"
            "test_a_copy_on_another_device_is_in_a_buffer_of_its_own",
        ),
    ),
)

FAULTS = (
    *SCHEDULES,
    *PLANS,
    *GRADIENTS,
    *WEIGHING,
    *PROBES,
    *STATE,
    *DEVICES,
    *REPLICAS,
    *QUANTIZATION,
    *TRAINER,
    *CLUSTER,
    *BY_NUMBERS,
)
