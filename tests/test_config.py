"""Configs: what they take, what they refuse and how they say so."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import inspect
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain import config as configs
from powertrain.backend import Backend, BackendConfig
from powertrain.config.checkpoint import (
    CheckpointConfig,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    SyncConfig,
)
from powertrain.config.checks import Config, as_config, replace, without_effect
from powertrain.config.data import DataConfig
from powertrain.config.failure import FailureConfig
from powertrain.config.json import to_json
from powertrain.config.run import STORAGE_VARIABLE, LoggingConfig, RunConfig
from powertrain.config.scaling import ScalingConfig
from powertrain.config.trace import ProfileConfig, TraceConfig
from powertrain.config.validation import ValidationConfig, ValidationTaskConfig
from powertrain.errors import ConfigError
from powertrain.jax import JaxConfig
from powertrain.lightgbm import LightGBMConfig
from powertrain.tensorflow import TensorflowConfig
from powertrain.torch.config import TorchConfig
from powertrain.xgboost import XGBoostConfig

ALL = [
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    ProfileConfig,
    RunConfig,
    ScalingConfig,
    SyncConfig,
    TorchConfig,
    TraceConfig,
    ValidationConfig,
    ValidationTaskConfig,
]
PATCHES = ("dataloader", "forward", "backward", "h2d")
DEFAULTABLE = [cls for cls in ALL if cls is not ValidationConfig]


class Callback:
    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None: ...


def validate(checkpoint: Any, batch_size: int = 1) -> dict[str, float]:
    return {"score": float(batch_size)}


def stop_late(name: str, metrics: Any) -> bool:
    return False


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """A monkeypatch of this test alone, undone before anybody looks at what the test left behind."""
    with pytest.MonkeyPatch.context() as own:
        yield own


# --------------------------------------------------------------------------- what is refused

#: (class, arguments, pieces the message must have beside the class's name: field, value, fix)
BAD: list[tuple[type[Config], dict[str, Any], list[str]]] = [
    (ScalingConfig, {"num_workers": -1}, ["num_workers=-1", "negative", "Use 0"]),
    (ScalingConfig, {"num_workers": True}, ["num_workers=True", "bool", "N worker processes"]),
    (ScalingConfig, {"num_workers": 2.0}, ["num_workers=2.0", "float", "(min, max)"]),
    (ScalingConfig, {"num_workers": None}, ["num_workers=None", "(min, max)"]),
    (ScalingConfig, {"num_workers": 2**40}, ["num_workers=1099511627776", "out of range", "at least 0"]),
    (ScalingConfig, {"num_workers": lambda: 2}, ["num_workers=<function", "by a function", "(min, max)"]),
    (ScalingConfig, {"num_workers": (4, 2)}, ["num_workers=(4, 2)", "above the maximum", "(2, 4)"]),
    (ScalingConfig, {"num_workers": (0, 2)}, ["num_workers=(0, 2)", "from 1 on", "(min, max)"]),
    (ScalingConfig, {"num_workers": (1, 2, 3)}, ["num_workers=(1, 2, 3)", "pair", "(2, 8)"]),
    (ScalingConfig, {"num_workers": (1, "2")}, ["num_workers=(1, '2')", "whole numbers", "(min, max)"]),
    (ScalingConfig, {"num_workers": [2, 8]}, ["num_workers=[2, 8]", "list", "(min, max)"]),
    (ScalingConfig, {"use_gpu": 1}, ["use_gpu=1", "True or False"]),
    (ScalingConfig, {"use_gpu": "yes"}, ["use_gpu='yes'", "True or False"]),
    (ScalingConfig, {"resources_per_worker": [("CPU", 1)]}, ["resources_per_worker=[", "dict", '"CPU": 2']),
    (ScalingConfig, {"resources_per_worker": {"CPU": -1}}, ["{'CPU': -1}", "below zero", "0 or more"]),
    (ScalingConfig, {"resources_per_worker": {"CPU": "4"}}, ["'4'", "not a number", "finite number"]),
    (ScalingConfig, {"resources_per_worker": {"CPU": True}}, ["True", "not a number", "{'CPU': 1}"]),
    (ScalingConfig, {"resources_per_worker": {"CPU": float("nan")}}, ["nan", "finite number"]),
    (ScalingConfig, {"resources_per_worker": {"cpu": 4}}, ["{'cpu': 4}", "capitals", "'CPU'"]),
    (ScalingConfig, {"resources_per_worker": {3: 4}}, ["{3: 4}", "not a string", '"CPU"']),
    (ScalingConfig, {"resources_per_worker": {"TPU": 4}}, ["{'TPU': 4}", "TPUs are not supported"]),
    (
        ScalingConfig,
        {"use_gpu": True, "resources_per_worker": {"GPU": 1.5}},
        ["{'GPU': 1.5}", "1.5 GPUs", "whole number of GPUs"],
    ),
    (
        ScalingConfig,
        {"use_gpu": True, "resources_per_worker": {"GPU": 0}},
        ["use_gpu=True", "{'GPU': 0}", "contradictory", "use_gpu=False"],
    ),
    (
        ScalingConfig,
        {"resources_per_worker": {"GPU": 1}},
        ["use_gpu=False", "{'GPU': 1}", "contradictory", "use_gpu=True"],
    ),
    (ScalingConfig, {"accelerator_type": "A100"}, ["'A100'", "use_gpu=False", "Set use_gpu=True"]),
    (ScalingConfig, {"use_gpu": True, "accelerator_type": ""}, ["accelerator_type=''", "empty"]),
    (ScalingConfig, {"placement_strategy": "pack"}, ["'pack'", "mean 'PACK'", "'STRICT_SPREAD'"]),
    (ScalingConfig, {"placement_strategy": 3}, ["placement_strategy=3", "'SPREAD'", "'STRICT_PACK'"]),
    (ScalingConfig, {"trainer_resources": {"CPU": -1}}, ["trainer_resources={'CPU': -1}", "0 or more"]),
    (ScalingConfig, {"use_tpu": True}, ["use_tpu=True", "TPUs are not supported", "use_gpu=True"]),
    (ScalingConfig, {"topology": "4x4"}, ["topology='4x4'", "TPUs are not supported"]),
    (ScalingConfig, {"elastic_resize_monitor_interval_s": "5"}, ["_interval_s='5'", "number"]),
    (ScalingConfig, {"label_selector": "spot"}, ["label_selector='spot'", "dict of strings"]),
    (ScalingConfig, {"label_selector": {"zone": 1}}, ["{'zone': 1}", "dict of strings"]),
    (
        ScalingConfig,
        {"num_workers": 3, "label_selector": [{"zone": "a"}]},
        ["num_workers=3", "1 selectors", "one selector per worker"],
    ),
    (ScalingConfig, {"engine": "locl"}, ["engine='locl'", "mean 'local'", "'torchrun'"]),
    (ScalingConfig, {"engine": None}, ["engine=None", "'auto'"]),
    (ScalingConfig, {"engine": "inline", "num_workers": 2}, ["'inline'", "num_workers=2", "num_workers=0"]),
    (ScalingConfig, {"engine": "inline", "num_workers": (1, 1)}, ["'inline'", "(1, 1)", "one number"]),
    (ScalingConfig, {"engine": "torchrun", "num_workers": (1, 2)}, ["'torchrun'", "(1, 2)", "one number"]),
    (ScalingConfig, {"engine": "local", "num_workers": 0}, ["'local'", "num_workers=0", "num_workers=1"]),
    (ScalingConfig, {"engine": "ray", "num_workers": 0}, ["'ray'", "num_workers=0", 'engine="inline"']),
    (
        ScalingConfig,
        {"engine": "local", "num_workers": 2, "placement_strategy": "STRICT_SPREAD"},
        ["'local'", "'STRICT_SPREAD'", 'placement_strategy="SPREAD"'],
    ),
    (ScalingConfig, {"engine": "local", "label_selector": {"a": "b"}}, ["{'a': 'b'}", 'engine="ray"']),
    (ScalingConfig, {"queue_timeout_s": 0}, ["queue_timeout_s=0", "above zero"]),
    (
        ScalingConfig,
        {"num_workers": (1, 2), "placement_strategy": "STRICT_PACK"},
        ["(1, 2)", "'STRICT_PACK'", 'placement_strategy="PACK"'],
    ),
    (ScalingConfig, {"engine_options": {"adress": "auto"}}, ["'adress'", "mean 'address'"]),
    (ScalingConfig, {"engine_options": ["address"]}, ["engine_options=['address']", "dict"]),
    (
        ScalingConfig,
        {"engine": "local", "engine_options": {"address": "auto"}},
        ["'address'", 'engine="ray"'],
    ),
    (ScalingConfig, {"num_worker": 2}, ["no field 'num_worker'", "mean 'num_workers'"]),
    (ScalingConfig, {"bundle_label_selector": {}}, ["'bundle_label_selector'", "Use label_selector"]),
    (FailureConfig, {"max_failures": -2}, ["max_failures=-2", "at least -1"]),
    (FailureConfig, {"max_failures": 1.5}, ["max_failures=1.5", "whole number"]),
    (FailureConfig, {"fail_fast": "rise"}, ["fail_fast='rise'", "True, False, 'raise'"]),
    (FailureConfig, {"fail_fast": 1}, ["fail_fast=1", "True, False, 'raise'"]),
    (
        FailureConfig,
        {"fail_fast": True, "max_failures": 3},
        ["max_failures=3", "fail_fast=True", "max_failures=0"],
    ),
    (FailureConfig, {"fail_fast": "raise", "max_failures": -1}, ["max_failures=-1", "'raise'"]),
    (
        FailureConfig,
        {"controller_failure_limit": -2},
        ["controller_failure_limit=-2", "at least -1"],
    ),
    (FailureConfig, {"max_preemption_failures": -2}, ["max_preemption_failures=-2", "at least -1"]),
    (FailureConfig, {"relax_collectives_on_preemption": 1}, ["_on_preemption=1", "True or False"]),
    (FailureConfig, {"preemption_grace_s": "soon"}, ["preemption_grace_s='soon'", "number"]),
    (FailureConfig, {"hang_timeout_s": 0}, ["hang_timeout_s=0", "above zero"]),
    (FailureConfig, {"on_hang": "kill"}, ["on_hang='kill'", "'restart', 'report', 'fail'"]),
    (FailureConfig, {"signal_grace_s": -1}, ["signal_grace_s=-1", "above zero"]),
    (FailureConfig, {"max_failure": 3}, ["no field 'max_failure'", "mean 'max_failures'"]),
    (CheckpointConfig, {"num_to_keep": 0}, ["num_to_keep=0", "at least 1"]),
    (CheckpointConfig, {"num_to_keep": "3"}, ["num_to_keep='3'", "whole number"]),
    (CheckpointConfig, {"checkpoint_score_attribute": 3}, ["checkpoint_score_attribute=3", "string"]),
    (CheckpointConfig, {"checkpoint_score_order": "minimum"}, ["'minimum'", "'max', 'min'"]),
    (CheckpointConfig, {"checkpoint_score_order": "min"}, ["attribute=None", "'min'", "Name the metric"]),
    (CheckpointConfig, {"checkpoint_frequency": -5}, ["checkpoint_frequency=-5", "at least 0"]),
    (CheckpointConfig, {"staging_dir": "s3://b/c"}, ["staging_dir='s3://b/c'", "own disk"]),
    (CheckpointConfig, {"staging_bytes": 0}, ["staging_bytes=0", "at least 1"]),
    (CheckpointConfig, {"on_full": "drop"}, ["on_full='drop'", "'replace', 'wait'"]),
    (CheckpointConfig, {"on_lost": "ignore"}, ["on_lost='ignore'", "'raise', 'warn'"]),
    (CheckpointConfig, {"checkpoint_at_end": "yes"}, ["checkpoint_at_end='yes'", "True or False"]),
    (CheckpointConfig, {"_checkpoint_keep_all_ranks": True}, ["_keep_all_ranks", "every rank"]),
    (SyncConfig, {"sync_timeout": 0}, ["sync_timeout=0", "above zero", "positive"]),
    (SyncConfig, {"sync_timeout": float("inf")}, ["sync_timeout=inf", "finite"]),
    (SyncConfig, {"sync_timeout": 10**400}, ["sync_timeout=1000", "finite"]),
    (SyncConfig, {"sync_period": "10"}, ["sync_period='10'", "number"]),
    (SyncConfig, {"sync_artifacts": "no"}, ["sync_artifacts='no'", "True or False"]),
    (SyncConfig, {"sync_artifacts_on_checkpoint": 2}, ["_on_checkpoint=2", "True or False"]),
    (SyncConfig, {"upload_dir": "s3://b"}, ["no field 'upload_dir'", "storage_path"]),
    (LoggingConfig, {"log_level": "LOUD"}, ["log_level='LOUD'", "'DEBUG'"]),
    (LoggingConfig, {"log_level": 10}, ["log_level=10", "by name", "DEBUG"]),
    (RunConfig, {"name": "a/b"}, ["name='a/b'", "no slash", "resnet-2"]),
    (RunConfig, {"name": "a\\b"}, ["name=", "no slash"]),
    (RunConfig, {"name": ""}, ["name=''", "empty", "leave the field out"]),
    (RunConfig, {"name": ".."}, ["name='..'", "another directory"]),
    (RunConfig, {"name": "a\n"}, ["name='a\\n'", "cannot be seen"]),
    (RunConfig, {"name": "ä" * 101}, ["name='ääää", "200 bytes", "shorter"]),
    (RunConfig, {"name": 7}, ["name=7", "not a string"]),
    (RunConfig, {"storage_path": ""}, ["storage_path=''", "empty"]),
    (RunConfig, {"storage_path": b"/x"}, ["storage_path=b'/x'", "pathlib.Path"]),
    (RunConfig, {"storage_path": "a\0b"}, ["storage_path=", "NUL"]),
    (RunConfig, {"storage_path": "s3:/bucket/x"}, ["'s3:/bucket/x'", "slash is missing", "'s3://bucket/x'"]),
    (RunConfig, {"storage_path": "s3://"}, ["'s3://'", "nothing comes after", "s3://bucket/runs"]),
    (RunConfig, {"storage_filesystem": "s3"}, ["storage_filesystem='s3'", "pyarrow.fs.FileSystem"]),
    (RunConfig, {"failure_config": {"max_failures": 3}}, ["failure_config={", "dict", "FailureConfig(**"]),
    (RunConfig, {"checkpoint_config": {}}, ["checkpoint_config={}", "dict", "CheckpointConfig(**"]),
    (
        RunConfig,
        {"checkpoint_config": FailureConfig()},
        ["checkpoint_config=FailureConfig()", "CheckpointConfig"],
    ),
    (RunConfig, {"sync_config": SyncConfig}, ["sync_config=", "class itself", "SyncConfig()"]),
    (RunConfig, {"logging_config": "DEBUG"}, ["logging_config='DEBUG'", "LoggingConfig"]),
    (RunConfig, {"callbacks": Callback()}, ["callbacks=", "list", "callbacks=[...]"]),
    (RunConfig, {"callbacks": [Callback]}, ["callbacks=[", "class, not an instance", "Callback()"]),
    (RunConfig, {"callbacks": [print]}, ["callbacks=[", "none of the methods", "after_report"]),
    (RunConfig, {"worker_runtime_env": []}, ["worker_runtime_env=[]", "env_vars"]),
    (RunConfig, {"worker_runtime_env": {"pip": ["x"]}}, ["'pip'", "engine_options"]),
    (RunConfig, {"worker_runtime_env": {"working_dir": "."}}, ["'working_dir'", "RunConfig(working_dir"]),
    (RunConfig, {"worker_runtime_env": {"env_vars": {"A": 1}}}, ["'A'", "not a string", "as a string"]),
    (RunConfig, {"worker_runtime_env": {"env_vars": {"A=B": "1"}}}, ["'A=B'", "environment variable"]),
    (RunConfig, {"port": 70000}, ["port=70000", "65535"]),
    (RunConfig, {"trace": "off"}, ["trace='off'", "TraceConfig"]),
    (RunConfig, {"profile": "all"}, ["profile='all'", "ProfileConfig"]),
    (ProfileConfig, {"start_step": 0}, ["start_step=0", "1"]),
    (ProfileConfig, {"steps": 0}, ["steps=0", "1"]),
    (ProfileConfig, {"ranks": []}, ["ranks=[]", "no rank"]),
    (ProfileConfig, {"ranks": [-1]}, ["-1"]),
    (ProfileConfig, {"memory": "much"}, ["memory='much'", "True"]),
    (TraceConfig, {"mode": "loud"}, ["mode='loud'", "'summary'", "'cli'"]),
    (TraceConfig, {"profile": "deepest"}, ["profile='deepest'", "'run'"]),
    (TraceConfig, {"init_mode": "some"}, ["init_mode='some'", "'selective'"]),
    *((TraceConfig, {f"patch_{what}": "yes"}, [f"patch_{what}='yes'", "True"]) for what in PATCHES),
    (TraceConfig, {"sampler_interval_sec": 0}, ["sampler_interval_sec=0", "positive"]),
    (TraceConfig, {"sampler_interval_sec": 0.0001}, ["sampler_interval_sec=0.0001", "at least 0.1"]),
    (TraceConfig, {"logs_dir": 3}, ["logs_dir=3"]),
    (TraceConfig, {"logs_dir": "s3://bucket/logs"}, ["an address", "plain path"]),
    (TraceConfig, {"session_id": 3}, ["session_id=3"]),
    (TraceConfig, {"session_id": "a/../../b"}, ["session_id='a/../../b'", "plain name"]),
    (TraceConfig, {"bind_host": "example"}, ["bind_host='example'", "no IP address", "0.0.0.0"]),
    (TraceConfig, {"port": -1}, ["port=-1", "65535"]),
    (TraceConfig, {"flops_per_sample": -1.0}, ["flops_per_sample=-1.0", "positive"]),
    (TraceConfig, {"peak_flops": "many"}, ["peak_flops='many'"]),
    (RunConfig, {"verbose": 4}, ["verbose=4", "from 0 to 3"]),
    (RunConfig, {"stop": {}}, ["stop={}", "empty", "training_iteration"]),
    (RunConfig, {"stop": {"loss": "low"}}, ["'low'", "not a number", "training_iteration"]),
    (RunConfig, {"stop": {"loss": float("nan")}}, ["nan", "not a number"]),
    (RunConfig, {"stop": 10}, ["stop=10", "neither a dict nor a function"]),
    (RunConfig, {"stop": lambda: True}, ["stop=<function", "two arguments", "(name, metrics)"]),
    (RunConfig, {"log_to_file": 1}, ["log_to_file=1", "Use True"]),
    (RunConfig, {"log_to_file": "../x"}, ["'../x'", "without a slash"]),
    (RunConfig, {"log_to_file": ("a", "b", "c")}, ["('a', 'b', 'c')", "two file names", "stderr.log"]),
    (RunConfig, {"post_mortem": "yes"}, ["post_mortem='yes'", "True or False"]),
    (RunConfig, {"trackers": "mlflow"}, ["trackers='mlflow'", "list", "trackers=[...]"]),
    (RunConfig, {"trackers": ["mflow"]}, ["trackers=['mflow']", "'mlflow'", "tensorboard"]),
    (RunConfig, {"trackers": [Callback]}, ["class, not an instance", "Callback()"]),
    (RunConfig, {"trackers": [Callback()]}, ["is not a tracker", "powertrain.trackers.Tracker"]),
    (RunConfig, {"tracker_timeout_s": 0}, ["tracker_timeout_s=0"]),
    (RunConfig, {"report": "yes"}, ["report='yes'", "True or False"]),
    (RunConfig, {"metrics_port": 0}, ["metrics_port=0", "1 to 65535"]),
    (RunConfig, {"metrics_port": "9400"}, ["metrics_port='9400'", "whole number"]),
    (RunConfig, {"metrics_host": "a b"}, ["metrics_host='a b'", "not a host", "127.0.0.1"]),
    (RunConfig, {"metrics_host": "http://x/"}, ["metrics_host='http://x/'", "not a host"]),
    (RunConfig, {"report_barrier": "yes"}, ["report_barrier='yes'", "True or False"]),
    (RunConfig, {"shared_storage": "yes"}, ["shared_storage='yes'", "True or False"]),
    (RunConfig, {"working_dir": ""}, ["working_dir=''", "empty"]),
    (RunConfig, {"working_dir": "s3://b/x"}, ["working_dir='s3://b/x'", "local path"]),
    (RunConfig, {"local_dir": "/x"}, ["no field 'local_dir'", "Use storage_path"]),
    (RunConfig, {"storge_path": "/x"}, ["no field 'storge_path'", "mean 'storage_path'"]),
    (DataConfig, {"datasets_to_split": "train"}, ["'train'", "['train']"]),
    (DataConfig, {"datasets_to_split": None}, ["datasets_to_split=None", "'all'"]),
    (DataConfig, {"datasets_to_split": ["a", 1]}, ["['a', 1]", "list of dataset names"]),
    (DataConfig, {"datasets_to_split": ["a", "a"]}, ["['a', 'a']", "twice", "once"]),
    (DataConfig, {"enable_shard_locality": "no"}, ["enable_shard_locality='no'", "True or False"]),
    (DataConfig, {"resume": "row"}, ["resume='row'", "'batch'", "'epoch'"]),
    (DataConfig, {"cache_bytes": -1}, ["cache_bytes=-1", "out of range"]),
    (DataConfig, {"cache_dir": "s3://b/x"}, ["cache_dir='s3://b/x'", "own disk", "directory"]),
    (DataConfig, {"memory_bytes": 1}, ["memory_bytes=1", "at least 1048576"]),
    (DataConfig, {"seed": 2**53}, [f"seed={2**53}", "out of range"]),
    (DataConfig, {"on_change": "ignore"}, ["on_change='ignore'", "'refuse', 'restart_epoch'"]),
    (DataConfig, {"snapshot": 1}, ["snapshot=1", "neither True nor False"]),
    (TorchConfig, {"backend": "ncll"}, ["backend='ncll'", "mean 'nccl'", "cpu:gloo,cuda:nccl"]),
    (TorchConfig, {"backend": "cpu:gloo,cuda:nope"}, ["'nope'", "gloo"]),
    (TorchConfig, {"backend": ":gloo"}, ["':gloo'", "cpu:gloo"]),
    (TorchConfig, {"backend": 3}, ["backend=3", "string"]),
    (TorchConfig, {"init_method": "file"}, ["init_method='file'", "'env', 'tcp'"]),
    (TorchConfig, {"timeout_s": -1}, ["timeout_s=-1", "positive number of seconds"]),
    (TorchConfig, {"timeout_s": "1800"}, ["timeout_s='1800'", "Give a number"]),
    (XGBoostConfig, {"xgboost_communicator": "mpi"}, ["xgboost_communicator='mpi'", "'rabit'"]),
    (XGBoostConfig, {"communicator": "rabit"}, ["no field 'communicator'", "xgboost_communicator"]),
    (LightGBMConfig, {"port": 1}, ["no field 'port'"]),
    (TensorflowConfig, {"port": 1}, ["no field 'port'"]),
    (JaxConfig, {"use_tpu": True}, ["use_tpu=True", "TPUs are not supported", "use_gpu=True"]),
    (JaxConfig, {"use_gpu": "yes"}, ["use_gpu='yes'", "True or False"]),
    (TorchConfig, {"timeout": 5}, ["no field 'timeout'", "mean 'timeout_s'"]),
    (ValidationConfig, {}, ["fn=None", "missing", "Give a function"]),
    (ValidationConfig, {"fn": 3}, ["fn=3", "cannot be called"]),
    (ValidationConfig, {"fn": lambda: 1}, ["fn=<function", "first argument"]),
    (ValidationConfig, {"fn": validate, "task_config": {}}, ["task_config={}", "ValidationTaskConfig(**"]),
    (
        ValidationConfig,
        {"fn": validate, "ray_remote_kwargs": {"num_gpu": 1}},
        ["'num_gpu'", "mean 'num_gpus'"],
    ),
    (
        ValidationConfig,
        {"fn": validate, "ray_remote_kwargs": {"max_retry": 1}},
        ["'max_retry'", "mean 'max_retries'"],
    ),
    (ValidationConfig, {"fn": validate, "ray_remote_kwargs": {"num_gpus": -1}}, ["-1", "0 or more"]),
    (ValidationTaskConfig, {"timeout_s": 0}, ["timeout_s=0", "positive"]),
    (ValidationTaskConfig, {"fn_kwargs": [1]}, ["fn_kwargs=[1]", "keyword arguments"]),
    (ValidationTaskConfig, {"fn_kwargs": {"checkpoint": 1}}, ["'checkpoint'", "Remove"]),
]


@pytest.mark.parametrize(
    ("cls", "arguments", "pieces"),
    BAD,
    ids=[f"{c.__name__}-{i}-{'-'.join(a)}" for i, (c, a, _) in enumerate(BAD)],
)
def test_bad_input_gets_one_error_with_field_value_and_fix(
    cls: type[Config], arguments: dict[str, Any], pieces: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**arguments)
    message = str(caught.value)
    for piece in [cls.__name__, *pieces]:
        assert piece in message
    assert message.endswith(".")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_every_field_that_can_be_wrong_is_in_the_table() -> None:
    tried = {(cls, name) for cls, arguments, _ in BAD for name in arguments}
    fields = {(cls, field.name) for cls in ALL for field in dataclasses.fields(cls)}
    never_wrong = {(RunConfig, "progress_reporter"), (DataConfig, "execution_options")}
    assert fields - tried == never_wrong


def test_what_has_no_effect_here_is_accepted_and_named_in_one_sentence() -> None:
    run = RunConfig(
        progress_reporter=object(),
        failure_config=FailureConfig(controller_failure_limit=2, preemption_grace_s=10.0),
        checkpoint_config=CheckpointConfig(checkpoint_at_end=True),
        sync_config=SyncConfig(sync_period=10, sync_artifacts=True),
    )
    scaling = ScalingConfig(elastic_resize_monitor_interval_s=5)
    data = DataConfig(execution_options={"cpu": 1}, enable_shard_locality=False)
    validation = ValidationConfig(
        fn=validate, ray_remote_kwargs={"num_cpus": 2, "max_retries": 1, "retry_exceptions": [ValueError]}
    )
    said = without_effect([scaling, run, data, validation])
    assert said.startswith("Accepted as in Ray, but without effect here: ")
    assert said.count("\n") == 0
    for name in (
        "ScalingConfig(elastic_resize_monitor_interval_s=5) (capacity is watched continuously)",
        "FailureConfig(controller_failure_limit=2)",
        "preemption_grace_s",
        "checkpoint_at_end",
        "sync_period",
        "sync_artifacts=True",
        "progress_reporter",
        "execution_options",
        "enable_shard_locality",
        "ValidationConfig(ray_remote_kwargs={'max_retries', 'retry_exceptions'}) (a validation is a process of the run",
    ):
        assert name in said
    plain = ValidationConfig(fn=validate, ray_remote_kwargs={"num_cpus": 2})
    assert without_effect([ScalingConfig(), RunConfig(), DataConfig(), plain]) == ""


def test_a_filesystem_without_a_path_has_the_usual_one_on_it(patch: pytest.MonkeyPatch) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    patch.delenv(STORAGE_VARIABLE, raising=False)
    patch.setenv("HOME", "/home/me")
    assert RunConfig(storage_filesystem=fs.LocalFileSystem()).storage_root == "/home/me/powertrain_runs"
    patch.setenv(STORAGE_VARIABLE, "s3://bucket/runs")
    with pytest.raises(ConfigError, match="Give storage_path as well"):
        _ = RunConfig(storage_filesystem=fs.LocalFileSystem()).storage_root


def test_too_many_positions_and_a_field_given_twice_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="LoggingConfig has 1 fields, but 2 values"):
        LoggingConfig("INFO", "DEBUG")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"'max_failures' twice.*max_failures=3.*Keep the one by name"):
        FailureConfig(1, max_failures=3)  # type: ignore[misc]


def test_a_value_whose_repr_fails_or_is_huge_still_gets_a_short_error() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    with pytest.raises(ConfigError, match="Silent"):
        RunConfig(name=Silent())  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        RunConfig(name="x" * 100_000)
    assert len(str(caught.value)) < 500


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | st.sampled_from([10**400, object(), int, print, lambda: 0, Path("x"), *[cls() for cls in DEFAULTABLE]]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["CPU", "GPU", "env_vars", "address", "x", 3]), inner, max_size=2)
    ),
    max_leaves=4,
)
one_field = st.sampled_from([(cls, f.name) for cls in DEFAULTABLE for f in dataclasses.fields(cls)])


@given(one_field, junk)
def test_any_value_makes_a_config_that_checks_again_to_itself_or_a_config_error(
    where: tuple[type[Config], str], value: Any
) -> None:
    cls, name = where
    try:
        made = cls(**{name: value})
    except ConfigError:
        return
    assert replace(made) == made
    json.dumps(to_json(made))


# --------------------------------------------------------------------------- what is taken

amounts = st.dictionaries(
    st.sampled_from(["CPU", "memory", "accelerator_type:T4"]),
    st.integers(0, 64) | st.floats(0, 64),
    min_size=1,
)
sizes = st.integers(0, 4096) | st.tuples(st.integers(1, 64), st.integers(64, 128))
scalings = st.builds(
    ScalingConfig,
    num_workers=sizes,
    use_gpu=st.booleans(),
    resources_per_worker=st.none() | amounts,
    trainer_resources=st.none() | amounts,
    placement_strategy=st.sampled_from(("PACK", "SPREAD")),
    label_selector=st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4)),
    engine_options=st.none() | st.just({"address": "auto"}),
)
failures = st.builds(FailureConfig, max_failures=st.integers(-1, 9)) | st.builds(
    FailureConfig, fail_fast=st.sampled_from([True, False, "raise", "RAISE"])
)
checkpoints = st.builds(
    CheckpointConfig,
    num_to_keep=st.none() | st.integers(1, 99),
    checkpoint_score_attribute=st.just("eval/loss"),
    checkpoint_score_order=st.sampled_from(["min", "max"]),
)
runs = st.builds(
    RunConfig,
    name=st.none() | st.from_regex(r"[A-Za-z0-9äß._-]{3,60}", fullmatch=True),
    storage_path=st.none() | st.sampled_from(["runs", "/x/y", "~/z", "s3://bucket/x"]) | st.just(Path("/p")),
    failure_config=st.none() | failures,
    checkpoint_config=st.none() | checkpoints,
    logging_config=st.none() | st.builds(LoggingConfig, st.sampled_from(["info", "DEBUG"])),
    sync_config=st.none() | st.builds(SyncConfig, sync_timeout=st.integers(1, 9999)),
    worker_runtime_env=st.none() | st.just({"env_vars": {"A": "..."}}),  # what a repr shows of any value
    verbose=st.none() | st.integers(0, 3),
    stop=st.none() | st.just({"loss": 3}),
    log_to_file=st.sampled_from([True, False, "out.log", ("a.log", "b.log")]),
    working_dir=st.none() | st.sampled_from([".", "scratch", "/x"]),
)
others = (
    st.builds(
        DataConfig,
        st.just("all") | st.lists(st.text(min_size=1, max_size=5), unique=True),
        cache_bytes=st.none() | st.integers(0, 2**50),
        cache_dir=st.none() | st.just("/fast"),
        memory_bytes=st.integers(2**20, 2**40),
        seed=st.none() | st.integers(0, 2**53 - 1),
        on_change=st.sampled_from(["refuse", "restart_epoch"]),
    )
    | st.builds(TorchConfig, st.sampled_from([None, "gloo", "cpu:gloo,cuda:nccl"]), timeout_s=st.floats(1, 9))
    | st.builds(ValidationTaskConfig, st.none() | st.just({"batch_size": 4}), st.none() | st.integers(1, 9))
)
anything = scalings | failures | checkpoints | runs | others


@given(anything)
def test_pickle_copy_replace_and_repr_give_back_an_equal_config(made: Config) -> None:
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.copy(made) == made
    assert copy.deepcopy(made) == made
    assert replace(made) == made
    names = {name: getattr(configs, name) for name in configs.__all__}
    assert eval(repr(made), names) == made


@given(anything)
def test_json_names_every_field_and_survives_a_round_trip(made: Config) -> None:
    described = to_json(made)
    assert list(described) == [f.name for f in dataclasses.fields(made)]  # type: ignore[arg-type]
    assert json.loads(json.dumps(described)) == described


@given(scalings)
def test_resources_always_name_cpu_and_gpu_and_nothing_empty(scaling: ScalingConfig) -> None:
    resources = scaling.resources
    assert (resources["GPU"] > 0) == scaling.use_gpu
    assert all(amount > 0 for name, amount in resources.items() if name not in ("CPU", "GPU"))
    assert scaling.min_workers <= scaling.max_workers
    assert scaling.is_elastic == (scaling.min_workers != scaling.max_workers)


@pytest.mark.parametrize(
    ("arguments", "resources", "explicit"),
    [
        ({}, {"CPU": 1, "GPU": 0}, False),
        ({"resources_per_worker": {}}, {"CPU": 1, "GPU": 0}, False),
        ({"use_gpu": True}, {"CPU": 1, "GPU": 1}, False),
        ({"use_gpu": True, "resources_per_worker": {"CPU": 4}}, {"CPU": 4, "GPU": 1}, True),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.5, "CPU": 0}}, {"CPU": 0, "GPU": 0.5}, True),
        (
            {"use_gpu": True, "resources_per_worker": {"accelerator_type:T4": 0.0001}},
            {"CPU": 0, "GPU": 1, "accelerator_type:T4": 0.0001},
            True,
        ),
        (
            {"use_gpu": True, "accelerator_type": "A100"},
            {"CPU": 1, "GPU": 1, "accelerator_type:A100": 0.001},
            False,
        ),
        ({"resources_per_worker": {"CPU": 2, "GPU": 0, "disk": 0}}, {"CPU": 2, "GPU": 0}, True),
    ],
)
def test_resources_of_a_worker(
    arguments: dict[str, Any], resources: dict[str, float], explicit: bool
) -> None:
    scaling = ScalingConfig(**arguments)
    assert scaling.resources == resources
    assert scaling.explicit_resources is explicit


def test_an_auto_engine_that_turns_out_local_is_checked_again() -> None:
    scaling = ScalingConfig(num_workers=2, label_selector={"zone": "a"})
    with pytest.raises(ConfigError, match="label_selector"):
        replace(scaling, engine="local")
    assert replace(scaling, engine="ray").engine == "ray"


def test_values_are_kept_in_one_form() -> None:
    numpy = pytest.importorskip("numpy")
    assert type(ScalingConfig(num_workers=numpy.int64(3)).num_workers) is int
    assert RunConfig(storage_path=Path("/x")) == RunConfig(storage_path="/x")
    assert FailureConfig(fail_fast="RAISE").fail_fast == "raise"
    assert LoggingConfig("debug").log_level == "DEBUG"
    assert DataConfig(["train"]) == DataConfig(("train",))
    assert CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False) == CheckpointConfig()
    assert RunConfig(callbacks=[]).callbacks == ()


def test_missing_configs_become_their_defaults() -> None:
    run = RunConfig(failure_config=None, checkpoint_config=None, sync_config=None, logging_config=None)  # type: ignore[arg-type]
    assert run == RunConfig()
    assert run.failure_config == FailureConfig()
    assert ValidationConfig(validate).task_config == ValidationTaskConfig()


def test_a_repr_shows_only_what_was_changed() -> None:
    assert repr(RunConfig()) == "RunConfig()"
    assert (
        repr(ScalingConfig(num_workers=(2, 8), use_gpu=True))
        == "ScalingConfig(num_workers=(2, 8), use_gpu=True)"
    )
    nested = RunConfig(name="x", failure_config=FailureConfig(3))
    assert repr(nested) == "RunConfig(name='x', failure_config=FailureConfig(max_failures=3))"
    assert "fn=<function validate" in repr(ValidationConfig(validate))


def test_configs_cannot_be_changed_from_inside_or_outside() -> None:
    asked = {"CPU": 2}
    scaling = ScalingConfig(resources_per_worker=asked)
    asked["CPU"] = 99
    assert scaling.resources["CPU"] == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaling.num_workers = 3  # type: ignore[misc]


def test_configs_of_different_values_or_classes_differ() -> None:
    assert FailureConfig(1) != FailureConfig(2)
    other_class: Config = LoggingConfig()
    assert other_class != FailureConfig()


def test_replace_refuses_an_unknown_field_and_a_wrong_value() -> None:
    with pytest.raises(ConfigError, match="mean 'max_failures'"):
        replace(FailureConfig(), max_failure=1)
    with pytest.raises(ConfigError, match="max_failures=-5"):
        replace(FailureConfig(), max_failures=-5)
    with pytest.raises(ConfigError, match="not a config"):
        replace({"max_failures": 1}, max_failures=2)  # type: ignore[type-var]


def test_as_config_names_the_argument_and_the_class() -> None:
    assert as_config(None, ScalingConfig, "Trainer(scaling_config=...)") == ScalingConfig()
    torch = TorchConfig()
    assert as_config(torch, BackendConfig, "Trainer(backend_config=...)") is torch
    with pytest.raises(
        ConfigError, match=r"Trainer\(scaling_config=\.\.\.\).*num_workers.*ScalingConfig\(\*\*"
    ):
        as_config({"num_workers": 2}, ScalingConfig, "Trainer(scaling_config=...)")


def test_json_has_names_for_code_and_hides_environment_values() -> None:
    run = RunConfig(
        stop=stop_late, callbacks=[Callback()], worker_runtime_env={"env_vars": {"TOKEN": "secret"}}
    )
    described = to_json(run)
    assert described["stop"] == f"{__name__}.stop_late"
    assert described["callbacks"] == [f"{__name__}.Callback"]
    assert described["worker_runtime_env"] == {"env_vars": {"TOKEN": "<hidden>"}}
    runtime_env = {"env_vars": {"TOKEN": "secret"}, "pip": ["x"]}
    scaling = ScalingConfig(engine_options={"runtime_env": runtime_env})
    assert "secret" not in json.dumps(to_json(scaling))


def test_a_dataset_is_split_when_it_is_named_or_all_are() -> None:
    assert DataConfig().is_split("anything")
    some = DataConfig(["train"])
    assert some.is_split("train")
    assert not some.is_split("eval")


# --------------------------------------------------------------------------- where a run is kept


@pytest.mark.parametrize("config", [DataConfig, RunConfig, ScalingConfig, FailureConfig, CheckpointConfig])
def test_an_editor_is_shown_the_arguments_of_a_config(config: Any) -> None:
    assert list(inspect.signature(config).parameters) == [field.name for field in dataclasses.fields(config)]


def test_a_data_config_may_have_a_constructor_and_a_configure_of_its_own() -> None:
    class Halved(DataConfig):
        def __init__(self, share: float) -> None:
            """Sets nothing of the base, as a program does that leaves the work to configure()."""
            self.share = share

        def configure(self, datasets: Any, world_size: int, *_: Any, **__: Any) -> list[dict[str, Any]]:
            return [datasets for _ in range(world_size)]

    config = Halved(share=0.5)
    assert (config.share, config.datasets_to_split, config.is_split("train")) == (0.5, "all", True)
    assert DataConfig.default_ingest_options().resource_limits.object_store_memory is None


def test_the_storage_root_is_as_given_else_from_the_environment_else_the_default(
    patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patch.setenv("HOME", str(tmp_path))
    patch.delenv("POWERTRAIN_STORAGE", raising=False)
    assert RunConfig().storage_root == str(tmp_path / "powertrain_runs")
    patch.setenv("POWERTRAIN_STORAGE", "~/elsewhere")
    assert RunConfig().storage_root == str(tmp_path / "elsewhere")
    assert RunConfig(storage_path="~/given").storage_root == str(tmp_path / "given")
    assert RunConfig().storage_path is None


def test_a_relative_storage_path_is_made_absolute_and_a_url_is_left_alone(
    patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patch.chdir(tmp_path)
    assert RunConfig(storage_path="runs").storage_root == os.path.join(os.getcwd(), "runs")
    assert RunConfig(storage_path="s3://bucket/runs").storage_root == "s3://bucket/runs"


def test_a_bad_storage_variable_is_named(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("POWERTRAIN_STORAGE", "s3:/bucket")
    with pytest.raises(ConfigError, match=r"POWERTRAIN_STORAGE='s3:/bucket'.*'s3://bucket'"):
        _ = RunConfig().storage_root


def test_a_filesystem_goes_with_a_plain_path_on_it() -> None:
    fs = pytest.importorskip("pyarrow.fs")
    local = fs.LocalFileSystem()
    run = RunConfig(storage_path="bucket/runs", storage_filesystem=local)
    assert run.storage_root == "bucket/runs"
    assert to_json(run)["storage_filesystem"] == "pyarrow._fs.LocalFileSystem"
    with pytest.raises(ConfigError, match=r"contradictory.*without the scheme"):
        RunConfig(storage_path="s3://bucket/runs", storage_filesystem=local)


# --------------------------------------------------------------------------- backends


def test_backends_are_loaded_when_they_are_asked_for(patch: pytest.MonkeyPatch) -> None:
    torch = types.ModuleType("powertrain.torch.backend")
    torch.TorchBackend = type("TorchBackend", (), {})  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "powertrain.torch.backend", torch)
    assert BackendConfig().backend_cls is Backend
    assert TorchConfig().backend_cls is torch.TorchBackend
    assert isinstance(TorchConfig(), BackendConfig)


def test_a_backend_config_of_the_users_own_may_be_any_kind_of_class() -> None:
    @dataclasses.dataclass
    class Mutable(BackendConfig):
        port: int = 1

    class Wide(TorchConfig):
        def __init__(self, servers: int, **kwargs: Any) -> None:
            object.__setattr__(self, "servers", servers)
            super().__init__(**kwargs)

    assert to_json(Mutable(port=3))["port"] == 3
    assert Wide(servers=2, backend="gloo").backend == "gloo"
    with pytest.raises(ConfigError, match="timeout_s=-1"):
        Wide(servers=2, timeout_s=-1)


def test_a_backend_that_a_plugin_registered_is_known(patch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="after the plugin is imported"):
        TorchConfig(backend="mine")
    loaded = types.ModuleType("torch.distributed")
    loaded.Backend = types.SimpleNamespace(backend_list=["mine"])  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "torch.distributed", loaded)
    assert TorchConfig(backend="mine").backend == "mine"


# --------------------------------------------------------------------------- the source and Ray Train


def test_every_field_is_documented_right_below_it() -> None:
    modules = {sys.modules[cls.__module__] for cls in ALL}
    for node in [node for module in modules for node in ast.parse(inspect.getsource(module)).body]:
        if not isinstance(node, ast.ClassDef) or node.name not in {cls.__name__ for cls in ALL}:
            continue
        for statement, following in zip(node.body, node.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = f"{node.name}.{statement.target.id}"
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert documented or statement.target.id.startswith("_"), f"{name} has no documentation"


def test_importing_the_configs_is_light() -> None:
    heavy = "{'torch', 'ray', 'pyarrow', 'pandas', 'numpy'}"
    script = f"import sys, powertrain.config; sys.exit(str({heavy} & set(sys.modules) or '') or None)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


#: Where Ray Train 2.60 says what its classes take; the older module holds fields the newer one inherits.
_RAY_SOURCES: dict[str, tuple[str, ...]] = {
    "train/v2/api/config.py": (
        "ScalingConfig",
        "RunConfig",
        "CheckpointConfig",
        "FailureConfig",
        "LoggingConfig",
    ),
    "train/v2/api/validation_config.py": ("ValidationConfig", "ValidationTaskConfig"),
    "train/_internal/data_config.py": ("DataConfig",),
    "train/_internal/syncer.py": ("SyncConfig",),
    "train/torch/config.py": ("TorchConfig",),
}
_RAY_OLDER_SOURCES: dict[str, tuple[str, ...]] = {
    "air/config.py": ("ScalingConfig", "RunConfig", "CheckpointConfig", "FailureConfig"),
}


class RaySource:
    """Reads Ray's classes from its source: importing Ray takes seconds and starts threads."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def fields(self, path: str, name: str) -> dict[str, ast.expr | None]:
        """Each field or argument of a class in the order of its constructor, with its default."""
        cls = self.class_in(path, name)
        for statement in cls.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                names = [argument.arg for argument in statement.args.args[1:]]
                missing = len(names) - len(statement.args.defaults)
                return dict(zip(names, [*[None] * missing, *statement.args.defaults], strict=True))
        inherited = any(isinstance(base, ast.Name) and base.id == f"{name}V1" for base in cls.bases)
        found = self.fields("air/config.py", name) if inherited else {}
        for statement in cls.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found[statement.target.id] = statement.value
        return found

    def class_in(self, path: str, name: str) -> ast.ClassDef:
        body = ast.parse((self._root / path).read_text()).body
        return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)


@pytest.fixture(scope="module")
def ray_source() -> RaySource:
    spec = importlib.util.find_spec("ray")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("Ray is not installed")
    return RaySource(Path(spec.submodule_search_locations[0]))


def ray_classes(*sources: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(path, name) for source in sources for path, names in source.items() for name in names]


@pytest.mark.parametrize(("path", "name"), ray_classes(_RAY_SOURCES, _RAY_OLDER_SOURCES))
def test_every_field_of_ray_train_is_known_by_name(ray_source: RaySource, path: str, name: str) -> None:
    ours = getattr(configs, name)
    theirs = set(ray_source.fields(path, name))
    assert theirs
    assert theirs <= {field.name for field in dataclasses.fields(ours)} | set(ours._moved)


@pytest.mark.parametrize(("path", "name"), ray_classes(_RAY_SOURCES))
def test_positions_follow_ray_train(ray_source: RaySource, path: str, name: str) -> None:
    theirs = list(ray_source.fields(path, name))
    ours = [field.name for field in dataclasses.fields(getattr(configs, name))]
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize(("path", "name"), ray_classes(_RAY_SOURCES, _RAY_OLDER_SOURCES))
def test_the_defaults_of_ray_train_are_taken(ray_source: RaySource, path: str, name: str) -> None:
    cls = getattr(configs, name)
    required = {"fn": validate} if cls is ValidationConfig else {}
    known = {field.name for field in dataclasses.fields(cls)}
    defaults = {}
    for field, default in ray_source.fields(path, name).items():
        # A default that is a name stands for "deprecated", or for a number that is not in this file.
        if field in known and default is not None and not isinstance(default, ast.Name):
            defaults[field] = ast.literal_eval(default)
    assert cls(**required, **defaults) == cls(**required)


@pytest.mark.parametrize("ours", [CheckpointUploadMode, CheckpointConsistencyMode])
def test_the_modes_of_ray_train_exist(ray_source: RaySource, ours: type[Enum]) -> None:
    theirs = ray_source.class_in("train/v2/api/report_config.py", ours.__name__)
    names = [
        s.targets[0].id
        for s in theirs.body
        if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
    ]
    assert [mode.name for mode in ours] == names


@pytest.mark.parametrize(
    ("arguments", "total", "cpus", "gpus", "additional"),
    [
        ({"num_workers": 2}, {"CPU": 2}, 1, 0, {}),
        ({"num_workers": 2, "use_gpu": True}, {"GPU": 2}, 0, 1, {}),
        ({"num_workers": (1, 4)}, {"CPU": 4}, 1, 0, {}),
        (
            {"num_workers": 2, "use_gpu": True, "resources_per_worker": {"CPU": 4, "special": 0.5}},
            {"CPU": 8, "GPU": 2, "special": 1.0},
            4,
            1,
            {"special": 0.5},
        ),
        (
            {"num_workers": 1, "use_gpu": True, "accelerator_type": "A100"},
            {"GPU": 1, "accelerator_type:A100": 0.001},
            0,
            1,
            {"accelerator_type:A100": 0.001},
        ),
    ],
)
def test_what_workers_reserve_can_be_read_from_a_scaling_config(
    arguments: dict[str, Any], total: dict[str, float], cpus: float, gpus: float, additional: dict[str, float]
) -> None:
    config = ScalingConfig(**arguments)
    assert config.total_resources == total
    assert (config.num_cpus_per_worker, config.num_gpus_per_worker) == (cpus, gpus)
    assert config.additional_resources_per_worker == additional
    assert config.num_tpus_per_worker == 0
    assert config.elasticity_enabled is isinstance(arguments["num_workers"], tuple)
