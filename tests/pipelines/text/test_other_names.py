# SPDX-License-Identifier: Apache-2.0
"""TRL's names of settings are answered with ours, and ours exist; variables of the chat template reach the prompts."""

import re

import pytest
from typer.testing import CliRunner

from tests.support.models.language import tiny_tokenizer
from visalign.config import load_config
from visalign.errors import ConfigError, UserError
from visalign.other_names import OTHER_NAMES
from visalign.pipelines.cli.app import app
from visalign.pipelines.flow_grpo.config import FlowGRPOConfig
from visalign.pipelines.text.config import TextGRPOConfig, TextModelConfig
from visalign.pipelines.text.parts import prompt_encoder
from visalign.pipelines.text.sample import TextSampleConfig
from visalign.pipelines.text.supervised import TextDPOConfig
from visalign.schema import allowed_keys

ALL = {key for job in (TextGRPOConfig, TextDPOConfig, TextSampleConfig, FlowGRPOConfig) for key in allowed_keys(job)}
THINKING = "{{ messages[0].content }}{% if enable_thinking is false %}<end>{% endif %}"


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_every_setting_of_the_table_exists(name):
    for setting in OTHER_NAMES[name]:
        key = re.split("[= ]", setting.removeprefix("the option --"))[0].replace("LABEL", "*")
        free = key.startswith(("objective.changes.", "model.template.", "model.options."))
        assert free or key in ALL or key in ("output", "resume"), setting


def test_all_names_of_a_file_are_answered_at_once(tmp_path):
    (tmp_path / "trl.yaml").write_text("learning_rate: 1.0e-6\nbeta: 0.0\nrollout: {num_generations: 8}\nfoo: 1\n")
    answer = "Here num_generations is rollout.group_size; learning_rate is optimizer.lr; beta is objective.changes.kl."
    with pytest.raises(ConfigError, match=re.escape(answer)):
        load_config(TextGRPOConfig, tmp_path / "trl.yaml")


@pytest.mark.parametrize(
    ("schema", "override", "answer"),
    [
        (TextGRPOConfig, "optimizer.learning_rate=1", "Here learning_rate is optimizer.lr."),
        (TextGRPOConfig, "loss_type=dapo", "Here loss_type is objective.algorithm."),
        (TextDPOConfig, "beta=0.1", "Here beta is loss.beta."),
        (FlowGRPOConfig, "guidance_scale=3", "Here guidance_scale is model.guidance."),
        (FlowGRPOConfig, "network_dim=16", "Here network_dim is model.lora.rank."),
        (FlowGRPOConfig, "data.map={prompt:caption}", "YAML wants a blank after a colon: {name: value}."),
        (TextGRPOConfig, "rewards.terms={a: {where: ocr}}", "got 'ocr' (str), expected a mapping such as"),
        (TextGRPOConfig, "output_dir=x", "Here output_dir is the option --output."),
    ],
)
def test_a_name_is_answered_by_the_setting_of_the_job(schema, override, answer):
    with pytest.raises(ConfigError, match=re.escape(answer)):
        load_config(schema, None, [override])


def test_variables_of_the_template_reach_every_prompt():
    tokenizer = tiny_tokenizer(template=THINKING)
    models = [TextModelConfig(), TextModelConfig(template={"enable_thinking": False})]
    texts = [prompt_encoder(model, tokenizer).render("hi") for model in models]
    assert texts == ["hi", "hi<end>"]


@pytest.mark.parametrize(
    ("template", "variables", "message"),
    [
        (THINKING, {"enable_thinkng": False}, "'enable_thinkng'.*Did you mean 'enable_thinking'.*: enable_thinking"),
        (THINKING, {"messages": []}, "sets 'messages', which the prompt sets"),
        (None, {"enable_thinking": False}, "model.template: the tokenizer has no chat template"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(template, variables, message):
    with pytest.raises(UserError, match=message):
        prompt_encoder(TextModelConfig(template=variables), tiny_tokenizer(template=template))


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--learning_rate", "There is no option --learning_rate. Settings are written KEY=VALUE, without dashes"),
        ("--num-generations=4", "num_generations is rollout.group_size"),
        ("--foo", "such as optimizer.lr=1e-5; visalign configs NAME lists them"),
    ],
)
def test_a_setting_with_dashes_is_answered(option, answer):
    result = CliRunner().invoke(app, ["plan", "text_grpo", option, "8"])
    assert result.exit_code == 2 and answer in " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())
