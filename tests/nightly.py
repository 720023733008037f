"""What `make test-nightly` runs alone, beside the cases that tests thin out themselves (`tests/repeat.py`).

By file: tests, or single cases of one, that take a good part of a second or more and look at what a case that runs by
day looks at too: another case of the same test, or what is named behind them (D85). `tests/conftest.py` marks them,
and refuses names of no test. More stand in tests/nightly.txt, which `python -m tests.choose` writes (D110).
"""

from __future__ import annotations

from pathlib import Path

MEASURED = Path(__file__).with_suffix(".txt")
AT_NIGHT: dict[str, tuple[str, ...]] = {
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
    "benchmarks/test_tiny.py": (
        "test_runs[bench_lsh_quality]",  # test_runs[bench_lsh] trains by the same steps
        "test_runs[bench_towers]",  # runtime/test_pipeline_towers.py, tasks/test_plan.py
        "test_runs[bench_truth]",  # benchmarks/test_truth.py has its parts
        "test_the_borders_of_steps_on_two_nodes[False]",
    ),
    "checking/test_driver.py": (
        "test_odd_modules[cp2-sizes]",
        "test_odd_modules[dp4+zero3-counter]",
        "test_odd_models_on_tokens[dp3-adapted]",
        "test_odd_models_on_tokens[tp2-experts]",
        "test_odd_models_on_tokens[tp3-adapted]",
    ),
    "checking/test_terms.py": ("test_terms_that_cancel_are_no_mismatch[tp2+sp]",),
    "checkpoint/test_resume.py": ("test_other_numbers_of_ranks[True]",),
    "cli/test_cache.py": ("test_a_prediction_of_memory_is_kept[tp2]",),
    "cli/test_check.py": (
        "test_in_another_precision",  # precision/test_sharded.py
    ),
    "cli/test_diff.py": ("test_no_number_is_lost_in_a_narrow_terminal[60]",),
    "cli/test_explain.py": (
        "test_sixty_columns[words0]",
        "test_sixty_columns[words2]",
    ),
    "cli/test_figures.py": (
        "test_dump_and_explain_agree[tp4+sp]",
        "test_diff_agrees[dp4-tp4+sp]",
        "test_all_commands_say_the_same[dp2.cp2-padded]",
        "test_dump_and_explain_agree[dp2.tp2+zero3]",
        "test_replicas_send_once_and_tp_per_token",  # annotate/test_megatron.py, passes/test_data_passes.py
        "test_sp_sends_about_the_same_and_holds_less",  # annotate/test_megatron.py, memory/test_predict.py
    ),
    "cli/test_graph_files.py": (
        "test_a_file_dumps_like_its_model[logical-words1]",
        "test_a_file_dumps_like_its_model[logical-words2]",
        "test_a_file_dumps_like_its_model[exec-words6]",
        "test_a_file_dumps_like_its_model[exec-words7]",
        "test_a_file_dumps_like_its_model[pipeline-words9]",
        "test_a_file_dumps_like_its_model[pipeline-words10]",
        "test_check[annotated-words1]",
        "test_check[pipeline-words3]",
        "test_memory_and_switch",  # cli/test_memory.py has tokens of a graph file
        "test_batches_of_an_own_function_have_their_values[cached]",
    ),
    "cli/test_memory.py": (
        "test_who_pads_the_tokens[tp2-77-llama under tp2, 2 ranks, T = 77]",
        "test_who_pads_the_tokens[tp2+sp-78-llama under tp2+sp, 2 ranks, T = 78]",
        "test_who_pads_the_tokens[tp2+sp,cp2-77-llama, T = 77, rounded up to 78; the]",
    ),
    "cli/test_plan_verify.py": (
        "test_a_plan_is_run_and_measured",  # test_docs.py runs the command of docs/plan.md
    ),
    "cli/test_switch.py": ("test_a_model_with_a_table_in_fp32_is_sent_in_bf16[words1]",),
    "cli/test_train.py": (
        "test_ctrl_c_before_the_first_step_ends_at_once",  # train/test_interrupt.py, train/test_launch.py
        "test_the_first_error_of_a_rank_is_shown",  # train/test_launch.py
    ),
    "cost/test_calls.py": (
        "test_flops_are_the_textbook_ones[tp4]",
        "test_flops_are_the_textbook_ones[dp2.tp2]",
        "test_flops_are_the_textbook_ones[tp4+sp]",
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
    "graph_diff/test_compare.py": ("test_nothing_differs_from_itself[pp2.tp2]",),
    "graph_files/test_file.py": (
        "test_a_lowered_graph_comes_back[tp4]",
        "test_a_lowered_graph_comes_back[dp2.cp2.tp2+sp+zero3]",
        "test_a_lowered_graph_comes_back[tp4[*.attention: cp2.tp2+zero1]]",
        "test_a_stage_elsewhere[0]",
        "test_a_stage_elsewhere[4]",
    ),
    "lowering/test_alike.py": (
        "test_equals_lower[dp2.tp2+sp+remat(selective)]",
        "test_equals_lower[dp4+zero3+remat]",
        "test_equals_lower[dp4+chunks(4)]",
    ),
    "lowering/test_pipeline.py": (
        "test_one_activation_crosses_and_one_gradient[pp2]",
        "test_one_activation_crosses_and_one_gradient[pp2.tp2]",
        "test_one_activation_crosses_and_one_gradient[pp2.tp2+sp]",
        "test_one_activation_crosses_and_one_gradient[cp2.pp2.tp2+sp]",
        "test_tied_embeddings_are_on_two_stages[gpt-options1-embedding.weight]",
        "test_pickles[dp2.pp2+zero3+zb_h1]",
        "test_pickles[pp2+remat+interleaved_1f1b+cut(layers.0.ffn_norm|layers.1|layers.1.ffn_norm)]",
    ),
    "lowering/test_random_models.py": (
        "test_random_model[0]",
        "test_random_model[2]",
    ),
    "lowering/test_verify.py": (
        "test_every_pass_leaves_a_graph_that_verifies[cp2.tp2+sp]",
        "test_every_pass_leaves_a_graph_that_verifies[dp2.cp2+zero2]",
    ),
    "memory/test_pipeline.py": (
        "test_peak[llama-256-options5-pp2.tp2+sp+remat(selective)-2]",
        "test_peak[llama-256-options14-pp2+chunks(2)+cut(head)-3]",
        "test_two_micro_batches_per_rank_take_as_much_as_more[pp4+cut(layers.0.ffn_norm|layers.1|layers.1.ffn_norm)]",
        "test_two_micro_batches_per_rank_take_as_much_as_more[pp2+interleaved_1f1b+cut(layers.0.ffn_norm|layers.1|layers.1.ffn_norm)]",
    ),
    "memory/test_predict.py": (
        "test_peak[llama-256-float32-options0-dp1-2]",
        "test_peak[llama-256-float32-options2-dp1+remat(selective)-2]",
        "test_peak[llama-256-bfloat16-options8-tp2+remat-1]",
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
    "passes/test_chunk_loss.py": (
        "test_equal_to_one_device[cp2+chunks(64)]",
        "test_equal_to_one_device[tp2+sp+chunks(3)]",
        "test_logits_never_stand_whole[cp2-2-3]",
        "test_logits_never_stand_whole[tp2+sp-2-4]",
        "test_logits_of_logits[mixed-dp1+chunks(2)]",
    ),
    "passes/test_communication_passes.py": (
        "test_buckets_change_no_bit[dp2.cp2+zero3]",
        "test_buckets_change_no_bit[dp2.tp2+sp]",
        "test_lowered_graphs_say_what_they_send[dp2.cp2+zero2]",
        "test_lowered_graphs_say_what_they_send[dp2.tp2+sp+zero3]",
        "test_lowered_graphs_say_what_they_send[tp2+sp]",
        "test_no_wait_stands_earlier_than_it_must[cp2]",
        "test_no_wait_stands_earlier_than_it_must[tp2+sp]",
    ),
    "passes/test_data_passes.py": (
        "test_fp32_masters_give_the_bf16_gradients[dp2+zero2]",
        "test_fp32_masters_give_the_bf16_gradients[dp2+zero3]",
        "test_masters_in_fp32_around_a_bf16_graph[dp2+zero3]",
        "test_zero_cuts_over_all_data_axes_inside_of_tp[dp2.cp2.tp2+zero3]",
        "test_zero_one_and_two_gather_once_per_mini_batch[2]",
    ),
    "passes/test_mask_padding.py": (
        "test_odd_widths_are_exact[cos-dp2.tp3]",
        "test_odd_widths_are_exact[gelu-dp2.tp3]",
        "test_odd_widths_are_exact[maximum-dp2.tp4+sp+zero3]",
        "test_odd_widths_are_exact[normalise-dp2.tp3]",
        "test_odd_widths_are_exact[relu-tp3]",
        "test_odd_widths_are_exact[shift-dp2.tp4+sp+zero3]",
        "test_odd_widths_are_exact[softmax-tp3]",
        "test_odd_widths_are_exact[softplus-dp2.tp3]",
        "test_padding_of_every_result_is_zero[dp2.tp4+zero3]",
    ),
    "passes/test_placement_passes.py": (
        "test_after_insert_reshards_every_operand_lies_as_wanted[cp2.tp2+sp]",
        "test_after_insert_reshards_every_operand_lies_as_wanted[tp2+sp]",
        "test_after_insert_reshards_every_operand_lies_as_wanted[tp2]",
        "test_every_value_knows_its_local_shape[cp2.tp2+sp]",
        "test_every_value_knows_its_local_shape[dp2.cp2+zero3]",
        "test_every_value_knows_its_local_shape[tp2]",
    ),
    "passes/test_rematerialize.py": (
        "test_a_block_keeps_the_sum_that_it_reads_and_no_term_of_it[tp2+remat]",
        "test_a_block_keeps_the_sum_that_it_reads_and_no_term_of_it[tp2+sp+remat(layers.0)]",
        "test_a_block_keeps_the_sum_that_it_reads_and_no_term_of_it[tp2+sp+remat(selective)]",
        "test_budget_is_kept[0.25]",
        "test_budget_is_kept[0.95]",
        "test_copies_stand_right_before_their_first_use[dp2.tp2+sp+zero3]",
        "test_same_bits_of_odd_models[sizes]",
        "test_same_bits_on_all_ranks[cp2+remat(keep_comm)]",
        "test_same_bits_on_all_ranks[tp2+sp+remat(selective|redo_comm)]",
        "test_same_bits_on_all_ranks[tp2+sp+remat]",
        "test_same_bits_on_one_device[remat(60kB)]",
        "test_same_bits_on_one_device[remat(selective)]",
        "test_same_bits_on_one_device[remat]",
        "test_same_bits_with_dropout[remat]",
    ),
    "passes/test_write_in_place.py": (
        "test_no_bit_changes[gpt-tp2+sp]",
        "test_no_bit_changes[llama-dp2.tp2+sp+zero3+remat]",
        "test_no_bit_of_a_stage_changes[True]",
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
        "test_odd_models_captured_in_float64[bf16-sizes]",
        "test_odd_models_captured_in_float64[fp32-adapted]",
        "test_odd_models_captured_in_float64[bf16+low(norms|softmax|loss)-experts]",
    ),
    "precision/test_random.py": ("test_random_model_in_bf16_has_the_dtypes_that_it_says[7]",),
    "rules/test_table.py": (
        "test_options_on_sub_axes_are_exact[pointwise]",  # pointwise ops know nothing of degrees
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
    "runtime/test_gpu.py": (
        "test_training_equals_one_device[cpu]",  # test_engine.py
    ),
    "runtime/test_padding.py": (
        "test_a_model_that_would_see_padding_is_refused[mean-tp2+sp]",
        "test_a_model_that_would_see_padding_is_refused[scalar-tp2+sp]",
        "test_padded_tokens_leave_no_trace[cp4]",
        "test_padded_tokens_leave_no_trace[dp2.cp2.tp2+sp+zero3]",
        "test_dense_masks_are_padded_and_exact[cp2.tp2+sp]",
    ),
    "runtime/test_pipeline.py": (
        "test_llama[pp2-gpipe]",
        "test_llama[dp2.pp2+zero1-gpipe]",
        "test_llama[cp2.pp2-1f1b]",
        "test_odd_models[skips-pp2+zb_h1]",
        "test_odd_models[recomputed-pp2+zb_h1]",
        "test_odd_models[means-pp2+zb_h1]",
        "test_odd_modules[sizes-dp2.pp2+zero3]",
        "test_odd_modules[experts-dp2.pp2+zero3]",
        "test_zero_with_unequal_numbers_of_micro_batches[dp2.pp2+zero2+interleaved_1f1b]",
        "test_gpt_with_dropout_and_a_tied_head[tp2.pp2+gpipe]",
        "test_replicas_with_few_or_no_micro_batches[interleaved_1f1b-[[0], [1, 2, 3, 4]]]",
        "test_schedules_of_programs[pp4]",
        "test_schedules_of_programs[pp2+interleaved_1f1b]",
        "test_recomputation[pp2+remat(layers.0.ffn)]",
    ),
    "runtime/test_pipeline_memory.py": ("test_saved_values_are_freed_as_the_backward_runs[True]",),
    "runtime/test_pipeline_messages.py": (
        "test_a_gradient_that_comes_ready_made[pp2]",
        "test_a_gradient_that_comes_ready_made[dp2.pp2+zero3+gpipe]",
        "test_what_is_on_its_way_is_left_alone[gpipe-llama]",
        "test_what_is_on_its_way_is_left_alone[zb_h1-llama]",
        "test_gradients_are_not_added_into_what_is_sent[True]",
    ),
    "runtime/test_plain.py": (
        "test_like_eager[llama-tp2]",
        "test_like_eager[llama-cp2]",
        "test_like_eager[gpt-tp2]",
        "test_hugging_face[dp2.tp2]",
        "test_dropout_is_the_same_under_every_strategy[dp2.tp2]",
    ),
    "search/test_galvatron.py": (
        "test_never_worse_than_galvatrons_search[1-1-15.31]",
        "test_never_worse_than_galvatrons_search[4-1-14.16]",
        "test_never_worse_than_galvatrons_search[8-1-14.15]",
        "test_never_worse_than_galvatrons_search[16-2-15.13]",
        "test_never_worse_than_galvatrons_search[32-2-13.35]",
        "test_never_worse_than_galvatrons_search[32-4-15.2]",
        "test_never_worse_than_galvatrons_search[64-8-14.18]",
    ),
    "search/test_galvatron_plan.py": (
        "test_a_plan_runs",  # checking/test_module_rules.py has its kinds of strategies
    ),
    "search/test_kinds.py": (
        # stages that differ: test_stages.py
        "test_as_the_whole_model[dp2.tp2+sp+cut(layers.5)[layers.{0-3}: +remat; *.ffn: cp2] > dp2.cp2+zero3-8]",
    ),
    "search/test_price.py": (
        "test_two_shallow_models_say_what_a_deep_one_takes[dp4]",
        "test_two_shallow_models_say_what_a_deep_one_takes[dp2.tp2+sp+remat]",
    ),
    "search/test_layouts.py": ("test_what_was_lowered_says_how_all_layers_lie",),  # test_driver.py settles such sets
    "search/test_ruled.py": (
        "test_layers_that_save_are_found_by_their_programs",  # test_a_mixture_takes_what_its_layers_take
        "test_bins_have_room_where_the_head_runs_in_chunks",  # test_the_head_may_run_in_chunks, by position
    ),
    "search/test_simulate_switches.py": (
        "test_fusion_saves_the_latency_of_messages",  # benchmarks/test_simulate_tables.py
    ),
    "search/test_staged.py": ("test_what_zero_cuts_is_cut_once[dp4.pp2+zero3]",),
    "search/test_stages.py": (
        "test_what_is_proposed_runs",  # checking/test_module_rules.py has stages that differ
    ),
    "stages/test_cut.py": (
        "test_bits[llama]",
        "test_bits[mlp]",
    ),
    "stages/test_parts.py": (
        "test_gradients_are_in_the_backward[dp2.cp2]",
        "test_gradients_are_in_the_backward[dp2+zero1]",
        "test_where_collectives_go[dp2+zero1]",
        "test_where_collectives_go[dp2+zero3]",
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
    "runtime/test_tasks_drawn.py": ("test_drawn_plans_are_one_device",),  # test_tasks.py has four plans by day
    "test_examples.py": (
        "test_tasks[clip]",  # train/test_session.py trains tasks by day
        "test_tasks[translate]",
        "test_tasks[llava]",
    ),
    "tracer/test_attention.py": ("test_multi_head_attention_module[True]",),
    "tracer/test_canonical.py": (
        "test_signature[tied]",
        "test_signature[convnet]",
    ),
    "tracer/test_hosts.py": (
        "test_numbers_of_eager_runs[gemma2]",
        "test_numbers_of_eager_runs[falcon]",
    ),
    "tracer/test_signature.py": ("test_what_is_captured_is_the_same[llama]",),
    "transport/test_failures.py": (
        "test_a_missing_peer_is_named[die]",
        "test_a_reduction_ends_alike_where_the_run_fails_on_all_ranks[True]",
    ),
}
