"""Settings of other trainers, and the settings of a run config that correspond to them."""

import re
from dataclasses import fields

from .schema import PLACES, RunSections

_AMP = "optim_wrapper: {type: AmpOptimWrapper, dtype: bfloat16}"
_CLIP = "optim_wrapper: {clip_grad: {max_norm: 1.0}}"
_EVERY = "hooks.checkpoint.every_epochs or hooks.checkpoint.every_steps"
_WARMUP = "schedulers: {type: cosine, warmup: 500}"
_LOGGERS = "hooks.tensorboard, hooks.wandb, hooks.mlflow or hooks.trackio"
# Each row has a key path, alternatives, or a form with values; then names of other trainers.
_NAMES = {
    "train.max_epochs": "epochs num_epochs n_epochs num_train_epochs total_epochs",
    "train: {type: IterTrainLoop, max_steps: 1000}": "max_iters iterations"
    " num_steps num_iterations total_steps train_steps",
    "train.val_interval": "val_check_interval check_val_every_n_epoch eval_steps eval_strategy"
    " evaluation_strategy eval_interval eval_every validate_every evaluation",
    "train.log_every_steps": "log_every_n_steps logging_steps log_interval log_every print_freq"
    " logging_strategy",
    "hooks.step_blocks.steps": "steps_per_call steps_per_execution",
    "train.sanity_val": "num_sanity_val_steps",
    "train.type": "by_epoch",
    "train": "train_cfg trainer training",
    "val": "val_cfg",
    "test": "test_cfg",
    "optimizer.lr": "learning_rate base_lr max_lr init_lr",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.paramwise": "paramwise_cfg param_groups",
    "optimizer": "optim optimizers optimizer_config optim_cfg",
    "optim_wrapper.accumulative_counts": "accumulate_grad_batches gradient_accumulation_steps"
    " accumulation_steps grad_accum_steps grad_accumulation gradient_accumulation accumulate",
    _AMP: "precision mixed_precision fp16 bf16 amp use_amp autocast amp_level fp16_opt_level",
    _CLIP: "gradient_clip_val max_grad_norm grad_clip clip_grad_norm grad_norm_clip grad_clip_norm"
    " gradient_clipping clip_norm optimizer_config.grad_clip",
    "optim_wrapper: {clip_grad: {type: value, clip_value: 0.5}}": "gradient_clip_algorithm"
    " clip_grad_value clip_value",
    "schedulers": "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_schedulers lr_config"
    " param_scheduler",
    _WARMUP: "warmup warmup_steps warmup_ratio warmup_epochs warmup_iters num_warmup_steps",
    "data.train": "train_dataloader train_dataloaders train_loader dataloader",
    "data.val": "val_dataloader val_dataloaders val_loader eval_dataloader valid",
    "data.test": "test_dataloader test_loader",
    "data.train.dataset": "dataset train_dataset train_data trainset",
    "data.val.dataset": "val_dataset eval_dataset valid_dataset val_data valset",
    "data.train.batch_size": "per_device_train_batch_size per_gpu_train_batch_size"
    " train_batch_size samples_per_gpu batch_size_per_gpu batch",
    "data.val.batch_size": "per_device_eval_batch_size eval_batch_size val_batch_size",
    "data.train.num_workers": "dataloader_num_workers workers_per_gpu workers",
    "data.train.pin_memory": "dataloader_pin_memory",
    "data.train.drop_last": "dataloader_drop_last",
    "data.train.prefetch_factor": "dataloader_prefetch_factor",
    "data.train.collate": "collate_fn data_collator collator",
    "data.train.seed": "data_seed",
    "model.net": "network backbone architecture arch",
    "model.loss": "criterion loss_fn loss_function",
    "model.loss: {type: CrossEntropyLoss, label_smoothing: 0.1}": "label_smoothing"
    " label_smoothing_factor",
    "model.data_preprocessor": "preprocessor",
    "metrics": "val_evaluator test_evaluator evaluator evaluators compute_metrics",
    "activation_checkpointing": "gradient_checkpointing grad_checkpointing with_cp"
    " activation_checkpoint gradient_checkpointing_kwargs",
    "compile": "torch_compile dynamo_backend dynamo_config compile_cfg compile_model",
    "load_from": "pretrained pretrained_weights init_from finetune_from init_checkpoint"
    " pretrained_model",
    "freeze": "freeze_layers frozen frozen_stages freeze_backbone",
    "wrapper": "model_wrapper_cfg strategy distributed_type fsdp_config deepspeed ddp_backend"
    " distributed_strategy parallel",
    "wrapper.sync_batchnorm": "sync_bn sync_batchnorm",
    "wrapper.find_unused_parameters": "ddp_find_unused_parameters find_unused_parameters",
    "device": "accelerator use_cpu no_cuda use_cuda cuda",
    "launch.nproc": "devices gpus num_gpus n_gpu n_gpus num_processes world_size gpu_ids"
    " nproc_per_node",
    "launch": "env_cfg dist_cfg",
    "matmul_precision": "tf32 allow_tf32 float32_matmul_precision",
    "cudnn_benchmark": "benchmark",
    "limit_batches": "limit_train_batches limit_val_batches limit_test_batches max_batches",
    "overfit": "overfit_batches",
    "stepwrap train --dry-run": "fast_dev_run dry_run",
    "run_dir": "output_dir work_dir default_root_dir save_dir log_dir logging_dir out_dir exp_dir",
    "name": "run_name experiment_name exp_name experiment",
    "seed": "random_seed randomness manual_seed seed_everything",
    "resume": "resume_from_checkpoint ckpt_path resume_from checkpoint_path auto_resume",
    "imports": "custom_imports",
    "adapter": "lora peft_config lora_config",
    "hooks": "callbacks default_hooks custom_hooks plugins",
    "hooks.checkpoint": "enable_checkpointing checkpointing checkpoint_config",
    _EVERY: "save_steps save_strategy save_interval save_every every_n_epochs every_n_train_steps"
    " checkpoint_interval save_freq",
    "hooks.checkpoint.keep_last": "save_total_limit max_keep_ckpts save_top_k save_last",
    "hooks.checkpoint.keep_best": "metric_for_best_model monitor save_best load_best_model_at_end",
    "hooks.checkpoint.mode": "greater_is_better",
    "hooks.early_stop": "early_stopping early_stopping_patience patience",
    "hooks: {time_limit: {max_seconds: 3600}}": "max_time max_seconds time_budget",
    "hooks.progress": "enable_progress_bar disable_tqdm progress_bar",
    "hooks.profile": "profiler",
    _LOGGERS: "logger loggers report_to log_with vis_backends visualizer log_config",
}
# The setting, or a form with values, by the name that another trainer uses.
SETTINGS_BY_NAME = {name: ours for ours, names in _NAMES.items() for name in names.split()}
_TOP = frozenset(field.name for field in fields(RunSections))


def hint_elsewhere(key: str, *, is_similar: bool) -> str:
    """Return a hint to the setting that an unknown one may mean, "" if none is known.

    Only settings of sections, loaders and hooks are looked up: further below, names are the user's.

    Args:
        key: the key path of the unknown setting.
        is_similar: whether its section has a similar setting; then only names of other trainers
            are looked up.
    """
    *above, name = key.split(".")
    if len(above) > (2 if above[:1] in (["data"], ["hooks"]) else 1):
        return ""
    ours = SETTINGS_BY_NAME.get(name, "")
    if not ours and not is_similar:
        ours = name if name in _TOP and above else PLACES.get(name, "")
    if len(above) == 2 and above[0] == "data":
        ours = re.sub("^data.(train|val)", ".".join(above), ours)
    if ours in ("", key):
        return ""
    if " " in ours and " or " not in ours:
        return f"; write {ours}"
    return f"; did you mean {ours}{' at the top level' if ours == name else ''}?"
