"""What `make test-nightly` runs alone, beside the cases that tests thin out themselves (`tests/repeat.py`).

By file: tests, or single cases of one, that take a good part of a second or more and find nothing that a case which
runs by day does not find: another case of the same test, or what is named behind them. No line of the library is
covered by them alone (D85). `tests/conftest.py` marks them, and refuses names of no test.
"""

from __future__ import annotations

NIGHTLY: dict[str, tuple[str, ...]] = {
    "annotate/test_alternatives.py": (
        "test_no_alternative_beats_the_optimum[llama-cp2-cp]",
        "test_no_alternative_beats_the_optimum[llama-tp2+sp-tp]",
        "test_no_alternative_beats_the_optimum[mlp-tp4-tp]",
        "test_key_value_heads_that_do_not_divide",  # test_narrow.py
    ),
    "annotate/test_dims.py": ("test_rows_and_tokens[cp2.tp2+sp]",),
    "annotate/test_driver.py": (
        "test_annotations_type_check[dp2.cp2.tp2+sp+zero3]",
        "test_fused_projections_are_cut_part_by_part[chunk-4-4]",
        "test_fused_projections_are_cut_part_by_part[slice-8-2]",
        "test_fused_projections_are_cut_part_by_part[split-4-2]",
        "test_fused_projections_are_exact[('split', 5, 1)-cp2.tp2]",
        "test_overridden_strategies_stay_exact[*.down_proj.weight-S(0)@tp]",
        "test_overridden_strategies_stay_exact[*norm.weight-R@tp]",
        "test_overridden_strategies_stay_exact[head.weight-S(1)@tp]",
        "test_override_wins[S(1)@tp-[32, 48@tp]]",
    ),
    "annotate/test_megatron.py": (
        "test_context_parallel[2-2]",
        "test_logits_are_never_moved[cp2.tp2+sp]",
        "test_placements_do_not_depend_on_the_widths[cp2.tp2]",
        "test_placements_do_not_depend_on_the_widths[tp4]",
        "test_sequence_parallel[2]",
        "test_sequence_parallel_at_8b[tp8+sp-3]",
        "test_tensor_parallel[1-4]",
        "test_the_rest_is_small[cp2]",
        "test_the_rest_is_small[tp2]",
    ),
    "annotate/test_moving_sizes.py": (
        "test_forwards_alone[halves-64-tp2+sp]",
        "test_forwards_alone[later rows-8192-tp2+sp]",
        "test_forwards_alone[rows of a table-8192-tp2+sp]",
    ),
    "annotate/test_narrow.py": (
        "test_an_override_means_the_whole_axis[R@tp-[16, 64]]",
        "test_exact[dp2.tp4+sp+zero3-2]",
        "test_exact[tp4-1]",
        "test_no_collective_more_than_with_as_many_heads_as_ranks[tp4-1]",
        "test_what_is_done_to_keys_stays_on_the_ranks_of_their_head[norm-2]",
        "test_where_weights_lie[tp4-2-[16@tp:(1)2, 64]]",
        "test_where_weights_lie[tp8-2-[16@tp:(1)2, 64]]",
        # test_a_projection_of_groups_of_heads_is_cut_over_all_ranks
        "test_a_fused_projection_is_cut_over_all_ranks[2-tp4]",
    ),
    "cli/test_figures.py": (
        "test_dump_and_explain_agree[dp4]",
        "test_dump_and_explain_agree[tp4+sp]",
        "test_all_commands_say_the_same[tp2+sp-padded]",
        "test_diff_agrees[dp4-tp4+sp]",
    ),
    "cli/test_graph_files.py": (
        "test_a_file_dumps_like_its_model[logical-words1]",
        "test_a_file_dumps_like_its_model[logical-words2]",
        "test_a_file_dumps_like_its_model[annotated-words4]",
        "test_a_file_dumps_like_its_model[exec-words6]",
        "test_a_file_dumps_like_its_model[exec-words7]",
        "test_a_file_dumps_like_its_model[pipeline-words9]",
        "test_a_file_dumps_like_its_model[pipeline-words10]",
    ),
    "cli/test_memory.py": (
        "test_who_pads_the_tokens[tp2-77-llama under tp2, 2 ranks, T = 77]",
        "test_who_pads_the_tokens[tp2+sp-78-llama under tp2+sp, 2 ranks, T = 78]",
        "test_who_pads_the_tokens[tp2+sp,cp2-77-llama, T = 77, rounded up to 78; the]",
    ),
    "explain/test_roles.py": (
        "test_modules_that_do_the_same_are_one_line[tp2+sp[layers.{0-1}: cp2; layers.3: +remat]]",
    ),
    "explain/test_traffic.py": (
        "test_every_reshard_has_one_set_of_users[tp2+sp]",
        "test_every_reshard_has_one_set_of_users[cp2.tp2]",
        "test_reshards_and_collectives_send_the_same[tp2+sp]",
        "test_reshards_and_collectives_send_the_same[cp2.tp2]",
        "test_all_collectives_are_explained[tp2+sp]",
        "test_all_collectives_are_explained[cp2.tp2]",
        "test_all_collectives_are_explained[dp2]",
        "test_each_term_of_a_tied_weights_gradient_is_its_own[tp2]",
        "test_each_term_of_a_tied_weights_gradient_is_its_own[dp2.tp2+sp]",
    ),
    "memory/test_predict.py": (
        "test_peak[llama-256-float32-options0-dp1-2]",
        "test_peak[llama-256-float32-options2-dp1+remat(selective)-2]",
        "test_peak[llama-256-bfloat16-options7-tp2+remat-1]",
    ),
    "monitor/test_kills.py": (
        "test_survivors_name_the_victim[start-(0,)1]",
        "test_survivors_name_the_victim[reduction-(0,)]",
        "test_survivors_name_the_victim[evaluate-(2,)]",
        "test_survivors_name_the_victim[plain call-(0,)]",
    ),
    "monitor/test_lost_ranks.py": (
        "test_survivors_name_the_lost_rank[killed-2]",  # test_kills.py
        "test_survivors_name_the_lost_rank[raises-0]",
    ),
    "precision/test_accuracy.py": (
        "test_near_the_truth[vit]",
        "test_near_the_truth[mlp]",
    ),
    "precision/test_casts.py": (
        "test_casts_are_needed_and_made_once[vit]",
        "test_casts_are_needed_and_made_once[mlp]",
    ),
    "precision/test_dtypes.py": (
        "test_every_node_has_the_dtype_that_it_says[llama-precision8]",
        "test_every_node_has_the_dtype_that_it_says[mlp-precision3]",
    ),
    "runtime/test_devices.py": (
        "test_nothing_is_made_elsewhere[llama-dp2+zero3]",
        "test_nothing_is_made_elsewhere[llama-cp2]",
        "test_nothing_is_made_elsewhere[gpt-dp1+remat]",
        "test_nothing_is_made_elsewhere[vit-cp2]",
    ),
    "runtime/test_failure.py": (
        "test_the_others_name_the_rank_that_is_gone[switch-19]",  # monitor/test_lost_ranks.py
    ),
    "runtime/test_pipeline.py": (
        "test_llama[pp2-gpipe]",
        "test_llama[dp2.pp2+zero1-gpipe]",
        "test_llama[cp2.pp2-1f1b]",
    ),
    "runtime/test_plain.py": (
        "test_like_eager[llama-tp2]",
        "test_like_eager[llama-cp2]",
        "test_like_eager[gpt-tp2]",
    ),
    "switch/test_layout.py": (
        "test_stages_are_consecutive_ranks_wherever_pp_stands[dp2.pp2.tp2]",
        "test_stages_are_consecutive_ranks_wherever_pp_stands[dp2.tp2.pp2]",
    ),
    "switch/test_order.py": (
        "test_published_sums[C3-12.5/50-657-times8]",
        "test_targets_with_relays[C3-350]",
    ),
    "titan/test_checkpoints.py": (
        "test_the_data_of_another_number_of_ranks",  # recipes/test_loader.py
        "test_a_checkpoint_with_code_in_it",  # checkpoint/test_metadata.py
    ),
    "titan/test_parity.py": (
        # llama3 by day; test_checkpoints.py and recipes/ have qwen3
        "test_steps_of_three_strategies_from_one_seed_checkpoint[qwen3]",
    ),
    "titan/test_runs.py": (
        "test_strategies_from_the_command_line",  # recipes/test_recipes.py
    ),
    "transport/test_failures.py": ("test_a_missing_peer_is_named[die]",),
}
