"""The front doors: the public names of each folder, and no others."""

import importlib
import types

import pytest
from marks import slow
from programs import run

DOORS = {
    "collectives": """
        BaseDistBackend BaseMetric CollectiveError CollectiveGroup CollectiveHandle
        CollectiveRecord MPI4PyDist NonDist PicklableWrapper Progress TensorBaseDistBackend
        TorchCPUDist TorchCUDADist TorchDist all_gather all_gather_object all_gather_object_cpu
        all_gather_object_gpu all_reduce all_reduce_dict broadcast collect_results
        comm_device create_tmpdir distributed_available gather gather_object
        get_dist_backend get_local_rank get_rank get_world_size list_all_backends
        mean_scalars metric_sync obj2tensor pad_to_largest_tensor rank_zero_only
        recent_collectives reduce_mean register_dist_backend serialize_to_tensor
        set_default_dist_backend sync_random_seed synchronize tensor2obj
        trace_collectives unregister_dist_backend
        adopt_slurm agent_store all_on_one_host calling end_group explain_transport forget_meshes
        in_progress is_loopback is_tracing meet_at_master name_ranks open_store failure_of
        run_together
    """,
    "diagnostics": """
        Difference Ledger LedgerError LedgerHook first_difference read_ledger
    """,
    "loops": """
        Cadence Checkpoint CheckpointError CheckpointHook ConstantRate CosineDecay EMAHook
        EarlyStopHook EpochTrainLoop EvalSets FreezeHook GradNormHook Hook HookList InverseSqrtDecay
        IterTrainLoop LinearDecay LogHook LoggerHook LoopState MLflowHook MeanLoss MetricInputs
        MixCollator NanGuardHook NonFiniteError NoteStepHook Phase PolyLR PredictionHook ProfileHook
        ProcessMetric ProgressHook RunInfoHook RunSchedule ScheduleWindow SchedulerHook
        ShardedBatchSampler SpikeError SWAHook SpikeGuardHook Stateful StepBlocksHook SystemHook
        TensorBoardHook TestLoop TextCollator ThroughputHook TimeLimitHook TrackioHook ValLoop
        WandbHook Warmup WarmupStableDecay build_loader find_checkpoint keep_lists SubsetSampler
        WeightedSampler GradGuardHook
        list_checkpoints load_checkpoint mix_seed prefetch_to_device prune_checkpoints save_alone
        save_checkpoint seed_rng
    """,
    "parallel": """
        AndEvent AsyncResult BasePool BrokenPoolError CtxPool CtxPoolStorage CtxThreadPool
        EncodingError ExceptionWithTraceback IMapIterator IMapUnorderedIterator MapResult
        ModelAssigner ModelComplexityEstimator ModelSizeEstimator MultiP2PQueue OrEvent P2PPool
        Pickler Pool PoolStates PoolTerminatedError Process ProcessException RemoteError
        RemoteTraceback SimpleP2PQueue SimpleQueue TaskTimeoutError Thread ThreadException
        ThreadPool TimeoutError WorkerDiedError dumps free_memory get_context get_start_method
        loads mark_static_module proxy_ctx_caller reduce_for_any_script
    """,
    "plugins": "",
    "registry": """
        ADAPTERS COMM_HOOKS Config ConfigError DATALOADERS DATASETS DEFAULT_HOOKS DIST_BACKENDS
        DataSection
        Examination HOOKS HOOK_TYPES LOOPS LaunchSection LoadFromSection LoaderSection METRICS
        MODELS
        MODEL_WRAPPERS OPTIMIZERS MetricSection OPTIM_WRAPPERS ParamwiseSection PARAM_SCHEDULERS
        Problem Registration Registry RunSections SAMPLERS SchedulerSection SetsSection
        build_from_cfg build_model_from_cfg build_tree causes check_component
        check_config check_paramwise
        config_from_dict config_schema count_registered_modules get_default did_you_mean
        dump_config examine_config examine_names find_train_step find_transform sets_in
        format_config import_path import_problems is_users_file key_noted_on list_registrations
        load_config model_problems name_problems named_optimizers nearest source_folders
        optim_wrapper_sections stepping_class supply_where_taken traverse_registry_tree user_frame
    """,
    "rpc": """
        OrderedServerBase OrderedServerSimple OrderedServerSimpleImpl PushPullGradServer
        PushPullGradServerImpl PushPullModelServer PushPullModelServerImpl ReduceType RpcError
        RpcException RpcGroup RpcReference World get_cur_name get_cur_rank get_world
        is_world_initialized
    """,
    "runner": """
        Adapter Export ExportError LaunchError Runner add_adapter export_adapter export_model launch
        load_model load_weights
    """,
    "wrappers": """
        AmpOptimWrapper BaseModel BaseModule CallbackContext CommHook DataPreprocessor FutureResult
        LossWeight Mesh OptimWrapper OptimWrapperDict PostLocalSGD Preparation
        ReplicationCallbackDataParallel ReplicationError ReplicationSession
        SeparateDistributedDataParallel SingleDevice SlavePipe StepDataParallel
        StepDistributedDataParallel StepFullyShardedDataParallel SupervisedModel SyncMaster
        SynchronizedBatchNorm1d SynchronizedBatchNorm2d SynchronizedBatchNorm3d
        UnusedParametersError ZeroRedundancyOptimizer auto build_mesh compile_step convert_model
        convert_sync_batchnorm detect_anomalous_params dict_gather
        exec_data_parallel_replication_callback initialize is_model_wrapper is_module_wrapper
        meta_parameters parallelize param_groups parse_losses patch_replication_callback
        patch_sync_batchnorm revert_sync_batchnorm set_sbn_eps_mode total_norm
        uncounted_batch user_scattered with_train_step wrap_model
    """,
}


@pytest.mark.parametrize("folder", DOORS)
def test_front_door(folder: str) -> None:
    door = importlib.import_module(f"stepwrap.{folder}")
    assert sorted(door.__all__) == sorted(DOORS[folder].split())
    assert all(hasattr(door, name) for name in door.__all__)
    # `dir` is used for completion in notebooks and prompts.
    assert {*door.__all__} <= {*dir(door)}
    leaked = {
        name
        for name, value in vars(door).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and str(getattr(value, "__module__", "")).startswith("stepwrap")
        and name not in door.__all__
    }
    assert not leaked


@pytest.mark.parametrize(
    "name", ["diagnostics", "parallel", "registry", "runner", "runner.command.cli"]
)
def test_import_without_torch(name: str) -> None:
    code = f"import sys, stepwrap.{name}; sys.exit('torch' in sys.modules)"
    run("-c", code)


@pytest.mark.parametrize("more", ["stepwrap.registry.MODEL_WRAPPERS.get('ddp')", *slow("")])
def test_wrappers_do_not_import_sharding(more: str) -> None:
    """Parts of torch that only sharded and split models need are not imported otherwise."""
    code = (
        f"import sys, stepwrap.loops, stepwrap.wrappers, stepwrap.registry; {more}\n"
        "heavy = ('torch.distributed.' + name for name in ('tensor', 'fsdp', 'optim'))\n"
        "sys.exit(any(name in sys.modules for name in heavy))"
    )
    run("-c", code)
