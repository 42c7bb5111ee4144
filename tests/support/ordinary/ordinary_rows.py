"""The table: what must hold for each script of `scripts/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support import TESTS

SCRIPTS = TESTS / "ordinary" / "scripts"
# Whether bits are compared, or numbers to six digits. With three ranks DDP's buckets after a recovery may be others,
# and sum in another order: to be True when they are part of the state.
EXACT = True
ALL = "0+1+2@5:backward"  # nobody is left, and all begin again from the commit
ALL_AT_BEGIN = "0+1+2@5:begin"  # the same for a script without a backward pass there
PATIENCE = 3.0  # seconds


@dataclass(frozen=True, eq=False)
class Row:
    """`script` ends as undisturbed with rank 1 killed at each of `kills` ("STEP:POINT", see `ordinary_driver.POINTS`);
    or, where `refused` is a regular expression, it is refused before that, with a text that has it: by both
    launchers; with `torchrun_same` by everstep-run alone, because torchrun, which starts all again, needs no more.
    `carried`: a regular expression for the list of what the loop carries, of which the undisturbed run is warned; a row
    without it has no such warning. `unseen`: the launchers under which the run goes on after the kill and ends
    otherwise. There the log has a warning that names `differs`, and `everstep rehearse` finds it.
    """

    script: str
    kills: tuple[str, ...] = ("5:backward",)
    refused: str = ""
    torchrun_same: bool = False
    carried: str = ""
    unseen: tuple[str, ...] = ()
    differs: str = ""
    late: bool = False  # what is wrong cannot show before a peer was lost, and is refused then
    torchrun: bool = True
    apart: str = ""  # a regular expression for names of what each rank has for itself, and has again after the kill
    lines: Mapping[str, int] = field(default_factory=dict)  # of files that the script writes
    near: float = 2e-5  # where bits are not compared: what is lost or made twice differs by more
    exact: bool = True  # to the bit; False where docs/reference/session-determinism.md says that last bits may differ
    long: bool = False  # in `make soak`
    in_process: bool = False  # two of three go on in their processes
    patience: float | None = None  # seconds to wait for ranks that cannot come, in place of what is waited for users

    def refused_under(self, launcher: str) -> str:
        return "" if self.torchrun_same and launcher == "torchrun" else self.refused

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.script}.py"


NEW = r"(is a new process, and it|the step after it) (computes other gradients than|moves the parameters otherwise)"
RATE = r"hold different parameters.*run\.track\(|\['lr'\] is .*and was"
ENDED = r"the step after it computes other gradients|the ranks' collectives do not match"
AGENTS, TORCHRUN = "everstep-run", "torchrun"

ROWS = (
    Row(
        "documented",
        in_process=True,
        kills=("5:begin", "5:backward", "5:gradients", "5:optimizer", "5:tail", "5:between", ALL),
    ),
    # --- what is not tracked
    Row(
        "untracked_optimizer",
        refused=r"optimizer.*track\(",
    ),
    Row(
        "nothing_tracked",
        refused=r"(model|optimizer).*track\(",
    ),
    Row(
        "ema_untracked",
        refused=r"average.*track\(",
    ),
    # --- what moves before the optimizer, or behind a collective that follows it
    Row(
        "schedule_first",
    ),
    Row("native_scaler", kills=("5:gradients", "5:backward", "5:optimizer", ALL)),
    Row("schedule_in_tail", kills=("5:optimizer",)),
    Row(
        "counter_object_first",
    ),
    Row(
        "ema_first",
    ),
    Row(
        "ema_in_tail",
        kills=("5:optimizer",),
    ),
    Row("ema_by_data", kills=("5:backward", "5:optimizer"), long=True),
    Row("rate_by_hand"),
    Row(
        "rate_decayed_by_hand",
    ),
    Row("rate_by_own_counter", refused=RATE, late=True, carried=r"global_step"),
    Row("decay_by_hand", kills=("5:backward", "5:gradients", "5:optimizer")),
    Row(
        "decay_first",
        refused="model",
        torchrun_same=True,
    ),
    # --- more than one pass or one optimizer in a step
    Row("lbfgs", kills=("5:backward2", "5:optimizer", ALL)),
    Row(
        "sam",
        kills=("5:backward2",),
    ),
    Row("gan", kills=("5:backward2", "5:optimizer", "5:optimizer2")),
    Row(
        "gan_alternating",
        kills=("5:backward2", "5:optimizer3"),
    ),
    Row("gan_every_other_step", kills=("4:backward", "5:optimizer")),
    Row(
        "ppo",
        kills=("5:backward2", "5:optimizer"),
    ),
    Row("bad_batch_on_one_rank", kills=(), refused=r"left a step out.*[Rr]educe a flag", patience=PATIENCE),
    Row(
        "evaluated_on_one_rank",
        kills=(),
        refused=r"rank 0 is at run\.evaluate\(.*rank 1 at the end of the loop's body \(\w+\.py:30\): each",
    ),
    Row("metric_left_out", kills=(), refused=r"have begun \d+ collectives.*left one out"),
    Row("bad_batch_in_last_step", kills=(), refused=r"left a step out.*[Rr]educe a flag", patience=PATIENCE),
    Row("bad_batch_on_no_rank"),
    Row(
        "caught_exception",
        kills=("5:backward", "5:optimizer"),
    ),
    Row("caught_around_step", kills=(), refused=r"step 6 was ended by ValueError: a damaged sample.*`try` away"),
    Row(
        "accumulated_over_steps",
        refused="micro_batch=",
    ),
    # --- the ranks' data
    Row(
        "split_unseeded", refused=r"another sample than rank 0 under index.*random_split\(dataset, lengths, generator="
    ),
    # --- loaders
    Row(
        "distributed_sampler",
    ),
    Row(
        "distributed_sampler_iterated",
        refused=r"DistributedSampler.*run\.loader",
    ),
    Row(
        "plain_dataloader",
    ),
    Row(
        "plain_dataloader_tuple",
        refused=r"DataLoader.*run\.loader",
    ),
    Row("unweighted", kills=(), refused=r"not weighted.*batch\.scale\(loss\)"),
    Row("unweighted_micro_batches", kills=(), refused=r"not weighted.*batch\.scale\(loss\)"),
    Row("unweighted_evenly"),
    Row(
        "two_loaders",
        refused="loader",
    ),
    Row(
        "iterable_dataset",
        refused="(IterableDataset|Stream|rank)",
    ),
    # --- groups and collectives
    Row("ddp_own_group", exact=False),
    Row("ddp_gloo_group", exact=False),
    Row("metrics_group"),
    Row("log_by_messages"),
    Row("half_groups", refused=r"new_group\(\[0, 1\]\) \(half_groups\.py:17\).*run\.mesh", torchrun_same=True),
    Row(
        "pipeline_stage_in_step", refused=r"PipelineStage \(pipeline_stage_in_step\.py:\d+\).*run\.mesh", torchrun=False
    ),
    Row("group_by_hand", refused=r"ProcessGroupGloo\(\) \(group_by_hand\.py:\d+\).*dist\.new_group", torchrun=False),
    Row("remote_calls", refused=r"rpc\.init_rpc\(\) \(remote_calls\.py:\d+\).*torchrun", torchrun=False),
    Row(
        "rank0_before_steps",
        lines={"downloads.txt": 1},
        refused=r"run\.rank.*run\.once",
        torchrun_same=True,
    ),
    Row("environ_rank", lines={"log.txt": 12}),
    Row("environ_rank_once", lines={"log.txt": 12}, refused=r"RANK.*run\.rank", torchrun_same=True),
    Row(
        "init_process_group_first",
        refused=r"init_process_group.*everstep\.start",
        torchrun_same=True,
    ),
    Row(
        "evaluation_between_steps",
        kills=("5:between",),
        in_process=True,
        refused=r"evaluate\(",
        torchrun_same=True,
    ),
    Row(
        "compiled_ddp",
        refused=r"torch\.compile.*DistributedDataParallel\(torch\.compile",
        torchrun_same=True,
        long=True,
    ),
    Row("powersgd", refused="PowerSGD.*register_comm_hook"),
    Row(
        "growing_buffer",
    ),
    Row("buffer_none_first", in_process=True, kills=("5:backward", "0:backward", "9:optimizer", ALL)),
    Row("buffer_of_first_batch", refused=r"different values of model\.0\.scale.*None when its Distributed"),
    Row(
        "replaced_buffer",
        apart="mean$",
    ),
    Row(
        "send_recv",
    ),
    Row(
        "monitored_barrier",
    ),
    # --- randomness
    Row(
        "shared_generator",
        refused="drops|generator",
    ),
    Row(
        "dropout",
    ),
    Row(
        "random_in_step",
    ),
    Row(
        "mixup",
        refused="generator",
    ),
    Row(
        "mixup_tracked",
    ),
    Row(
        "gradient_noise",
    ),
    Row("random_dataset", long=True),
    Row(
        "generator_in_dataset",
    ),
    # --- averages, copies and other optimizers
    Row(
        "lookahead",
        kills=("3:backward", "5:backward", "7:backward"),
    ),
    Row("swa", kills=("5:backward", "5:optimizer")),
    Row("target_network", kills=("7:backward", "7:optimizer"), long=True),
    Row("own_optimizer", kills=("5:optimizer",), long=True),
    Row("optimizer_reset"),
    Row(
        "optimizer_made_anew",
        refused=r"optimizer.*track\(",
    ),
    Row("optimizer_in_backward", kills=("5:optimizer2",)),
    Row("two_optimizers", kills=("5:backward", "5:gradients2", "5:optimizer"), long=True),
    Row(
        "master_weights",
        refused=r"(master|optimizer).*track\(",
    ),
    Row("cpu_offload", refused=r"optimizer gets exp_avg, exp_avg_sq back.*when the step ends", carried="offloaded"),
    Row("best_weights", refused=r"hold different parameters|\bbest \(", late=True, carried="best.*kept"),
    Row("sgd_by_hand", kills=("5:backward", "5:tail")),
    Row("functional", kills=("5:tail",), long=True),
    Row("weights_averaged", kills=("7:optimizer",)),
    Row("local_sgd", refused="model.0.weight.*DistributedDataParallel"),
    Row(
        "post_local_sgd",
        refused="optimizer|PostLocalSGD",
    ),
    Row(
        "loss_with_parameters",
        refused=r"criterion.*track\(",
    ),
    Row(
        "one_of_two_tracked",
        refused=r"decoder.*track\(",
    ),
    Row("two_models", long=True),
    Row("distillation", long=True),
    # --- gradients
    Row("gradient_hooks", long=True),
    Row("accumulated_hooks", long=True),
    Row("zero_grad_first", kills=("5:backward", "5:optimizer")),
    Row("zero_grad_in_place", long=True),
    Row("sparse_zeroed"),
    Row("dataset_changed", refused=NEW + r".*dataset\.scale", late=True, carried=r"dataset\.scale"),
    Row("dataset_changed_advised", kills=("3:backward", "3:optimizer", "5:backward")),
    Row("hook_in_loop", refused=r"hook.*before run\.steps"),
    Row("hook_in_loop_advised", kills=("3:backward", "5:optimizer")),
    Row("optimizer_hook_in_loop", refused=r"hook clip.*on optimizer.*before run\.steps"),
    Row("heads_in_turn", kills=("5:backward", "7:backward")),
    Row("gradient_penalty"),
    Row("gradients_by_hand", kills=("5:backward", "5:gradients")),
    Row("gradients_by_async_hand", long=True),
    Row("micro_batches", kills=("5:backward2", "5:optimizer")),
    Row("contrastive", long=True),
    Row("amp", kills=("5:backward", "5:optimizer")),
    Row("overflow_on_one_rank", kills=("5:backward", "5:tail")),
    Row("fp16_hook", near=1e-3),
    # --- modules
    Row("static_graph"),
    Row("static_graph_no_sync", refused=r"no_sync\(\) \(static_graph_no_sync.*nullcontext", torchrun=False),
    Row("weight_tying", long=True),
    Row("unused_parameters"),
    Row("batch_norm", apart=r"running_|num_batches"),
    Row("batch_norm_evaluated", kills=("4:backward", "4:evaluated", ALL), apart=r"running_|num_batches"),
    Row(
        "batch_norms",
        apart=r"running_|num_batches",
    ),
    Row(
        "batch_norm_apart",
        apart=r"running_|num_batches",
        refused=r"model\.1\.running_mean.*broadcast_buffers=False",
    ),
    Row("replay_buffer_by_rank", refused=r"different values of memory, which is tracked.*run\.untracked\('memory'\)"),
    Row("queue_in_buffer", apart=r"queue"),
    Row(
        "codebook",
    ),
    Row("spectral_norm", apart=r"_[uv]$", long=True),
    Row(
        "unfrozen_later",
        refused=r"model\.0\.weight: requires_grad.*find_unused_parameters=True",
    ),
    Row(
        "unfrozen_later_frozen_first",
        refused=r"model\.0\.weight: requires_grad.*find_unused_parameters=True",
    ),
    Row("frozen_later", kills=("4:backward", "5:backward", "9:backward")),
    Row(
        "parameters_added_later",
        kills=("5:backward",),
        refused=r"head.*track\(",
    ),
    Row("compiled_inside_ddp", long=True),
    # --- schedules
    Row(
        "schedule_untracked",
        refused=r"schedule.*track\(",
    ),
    Row(
        "schedule_between_steps",
    ),
    Row("schedule_each_epoch", kills=("3:backward", "3:optimizer")),
    Row("one_cycle", kills=("5:backward", "5:optimizer"), long=True),
    Row("warm_restarts", kills=("5:backward", "5:optimizer"), long=True),
    Row("sequential_schedules", kills=("5:backward", "5:optimizer")),
    Row(
        "plateau",
        kills=("5:optimizer",),
    ),
    Row("plateau_between_steps", long=True),
    # --- the loop
    Row("own_loop", refused=r"optimizer\.step\(\) \(own_loop\.py:\d+\).*before run\.steps\(\)", torchrun=False),
    Row("curriculum", long=True),
    Row("curriculum_two_loops", refused=r"a second loop over the steps of this run"),
    Row("early_stop_by_rank0", kills=("5:backward",)),
    Row(
        "early_stop_by_patience",
        refused=r"left the loop after step 10, and ranks \[1\] did not",
        late=True,
        carried="best.*waited",
        unseen=(TORCHRUN,),
        differs="(best|waited)",
        patience=PATIENCE,
    ),
    Row("early_stop_by_patience_tracked"),
    Row(
        "early_stop_by_object",
        refused=r"left the loop after step 10, and ranks \[1\] did not",
        late=True,
        carried=r"patience\.best.*patience\.waited",
        unseen=(TORCHRUN,),
        differs=r"patience\.(best|waited)",
        patience=PATIENCE,
    ),
    Row("exit_in_loop"),
    Row("break_out_of_step", long=True),
    Row("left_then_met", kills=("5:backward", ALL), lines={"metric.txt": 1}),
    Row("continue_in_step", kills=("5:begin", "6:backward"), long=True),
    Row("next_step", long=True),
    Row("generator_of_steps", refused=r"generator.*yield step", torchrun_same=True),
    Row("trainer_class", long=True),
    Row("progress_bar", long=True),
    Row("tracker", lines={"tracker.txt": 12}),
    Row("loader_workers", long=True),
    # --- collectives
    Row("barrier", kills=("5:begin", "5:tail"), long=True),
    Row("broadcast_objects", kills=("5:begin",)),
    Row("gathered_metrics", kills=("5:optimizer",)),
    Row("losses_tracked"),
    Row(
        "losses_tracked_in_tail",
        kills=("5:optimizer",),
    ),
    # At step 5 rank 1 has one part, rank 2 two, rank 0 three: nobody has joined, one rank has, all others have.
    Row("join", kills=("5:backward", "2@5:backward2", "0@5:backward3")),
    Row("join_epoch", kills=("0@5:backward2",)),
    Row("join_around", long=True),
    Row("second_collective_thread", long=True),
    # --- beside training
    Row("logging_thread", long=True),
    Row("training_thread", torchrun=False),  # there an error in a thread ends no process
    Row("signal_handler", long=True),
    Row("own_checkpoint", long=True),
    Row("own_resume"),
    Row("replay_buffer", refused=NEW, late=True, carried=r"recent"),
    # --- evaluations in which a rank dies
    Row("evaluate_swaps_average", kills=("6:evaluate",)),
    Row("evaluate_swaps_by_copy", kills=("6:evaluate",), long=True),
    Row("plateau_in_evaluate", kills=("6:evaluate2", "6:evaluated")),
    Row("history_in_evaluate", kills=("6:evaluate", "6:evaluated")),
    Row("reduce_in_evaluate", kills=("6:evaluate", "0@6:evaluate"), long=True),
    Row("random_in_evaluate", kills=("6:evaluate", "5:backward")),
    # --- what an adversary has found; the worst first
    Row("center_in_dict", kills=("5:backward", "5:optimizer")),
    Row("plateau_after_step", kills=("6:optimizer",)),
    Row("layer_by_hand", kills=("5:backward", "5:gradients")),
    Row("lazy_regularisation", kills=("5:optimizer",)),
    Row("clamped_each_sixth", kills=("5:optimizer",)),
    Row("warmup_ends", kills=("5:optimizer",)),
    Row("caught_in_tail", kills=("5:optimizer", "5:backward")),
    Row("extra_state", kills=("5:backward", "5:optimizer")),
    Row("momentum_in_function"),
    Row("first_loss", refused=NEW, late=True, carried="first", unseen=(AGENTS,), differs="first"),
    Row("first_loss_tracked"),
    Row("normalised_by_first_batch", refused=NEW, late=True, carried=r"deviation.*mean"),
    Row("hidden_state_kept", refused=NEW + r".*hidden\[0\] \(tensor of shape", late=True, carried=r"hidden"),
    Row("set_up_in_first_forward", refused=ENDED, late=True, carried=r"initialized"),
    Row(
        "history_rebound",
        refused=NEW + r".*recent \(",
        late=True,
        carried=r"recent .*another object than the tracked one",
    ),
    Row("group_added", kills=("7:backward", "5:backward"), refused=r"add_param_group.*before run\.steps"),
    Row(
        "async_kept",
        kills=("5:optimizer",),
        refused=r"all_reduce.*was begun in an earlier step and is waited for in this one \(async_kept\.py:\d+\)",
        torchrun_same=True,
    ),
    Row("counted_in_array"),
    Row("large_codebook"),
    Row("momentum_halved"),
    Row(
        "bucket_views",
        kills=("5:backward", "5:optimizer"),
        long=True,
    ),
    Row("weighted_sampler"),
    Row("batch_sampler", refused=r"batch_sampler=.*sampler="),
    # --- plain variables, and what to write in their place
    Row("rate_by_iterator", refused=RATE, late=True, carried=r"taken"),
    Row("rate_by_iterator_advised"),
    Row("weight_by_generator", refused=NEW, late=True, carried=r"weights"),
    Row("weight_by_generator_advised"),
    Row("default_list", refused=NEW, late=True),
    Row("default_list_advised"),
    Row("dropout_by_counter", refused=NEW + r".*seen \(", late=True, carried=r"seen"),
    Row("dropout_decays", refused=NEW, late=True, carried=r"drop\.p"),
    Row("dropout_decays_advised"),
    Row("dropout_by_step"),
    Row("recent_losses", refused=NEW, late=True, carried="recent", unseen=(AGENTS,), differs="recent"),
    Row("recent_losses_advised"),
    Row("lengths_seen", refused=NEW + r".*seen \(", late=True, carried=r"seen"),
    Row("lengths_seen_advised"),
    Row("warmup_object", refused=RATE, late=True, carried=r"warmup\.taken"),
    Row("warmup_object_advised"),
    Row("options_counted", refused=NEW, late=True, carried=r"options\['taken'\]"),
    Row("options_counted_advised"),
    Row("mask_of_length", carried="current.*mask"),
    Row("mask_of_length_tril", carried="current.*mask"),
    Row("features_kept", carried="features"),
    # --- what no text tells: a new process plays a part of one that has trained, and is compared with it
    # After a restart of all processes it is compared with what was noted beside the commit.
    Row(
        "loss_switched_between",
        refused=NEW + r".*Options\.loss \(.*l1_loss there",
        late=True,
        carried=r"Options\.loss",
        kills=("5:backward", ALL),
    ),
    Row(
        "rate_by_hook",
        kills=("5:backward", ALL),
        refused=r"hold different parameters.*run\.track\(|\['lr'\] is .*and was",
        late=True,
    ),
    Row("mask_cached", kills=("5:begin", "5:backward", "4:between")),
    Row(
        "transform_switched",
        refused=NEW + r".*Noisy\.strength \(0\.5 there",
        late=True,
    ),
    Row("cached_baseline", kills=("5:backward", ALL), refused=NEW, late=True),
    Row("hook_on_ddp", refused=NEW, late=True),
    # A threshold that comes later: a process that has trained can tell; a restart is compared in its first step alone.
    Row(
        "weight_by_callback_unread",
        refused=NEW + r".*came 4 steps ago.*2 steps ago.*weight\.count \(9 there, 4 in the new",
        late=True,
        carried=r"weight\.count",
        unseen=(TORCHRUN,),
        differs=r"weight\.count",
    ),
    Row("noise_switched_off", refused=NEW + r".*augment\.kinds", late=True, carried=r"augment\.kinds"),
    Row(
        "weight_by_callback_later",
        refused=NEW + r".*weight\.count \(",
        late=True,
        carried=r"weight\.count",
        unseen=(TORCHRUN,),
        differs=r"weight\.count",
    ),
    Row(
        "weight_by_exception",
        refused=NEW + r".*Skip\.n \(",
        late=True,
        unseen=(TORCHRUN,),
        differs=r"Skip\.n",
    ),
    Row(
        "weight_by_class_method",
        refused=NEW + r".*Weight\.steps \(",
        late=True,
        carried=r"Weight\.steps",
        unseen=(TORCHRUN,),
        differs=r"Weight\.steps",
    ),
    # The parts begin anew. With a kill in the first one nothing differs at the restart: the list alone names it.
    Row(
        "rate_by_part",
        refused=RATE + r"|left the loop after step|did not within",
        late=True,
        carried=r"part \(rate_by_part\.py:20, which begins with its first pass",
        unseen=(TORCHRUN,),
        differs="part",
        patience=PATIENCE,
    ),
    Row("weight_by_eval", refused=NEW + r".*weight \(", late=True),
    Row("weight_by_eval_later", refused=NEW + r".*count \(", late=True, unseen=(TORCHRUN,), differs="count"),
    Row("closure_by_eval", refused=NEW + r".*weight", late=True),
    # --- and goes on well, wherever the part is left
    Row("names_behind_block", kills=("5:backward", "5:optimizer")),
    Row("block_in_function", kills=("5:backward", "5:optimizer")),
    Row("counted_over_ranks"),
    Row("ready_on_all", torchrun=False),
    Row("told_by_rank0", kills=("5:backward", "0@5:backward"), torchrun=False),
    Row("logged_behind_block", torchrun=False),
    Row("rank_cached", torchrun=False),
)
