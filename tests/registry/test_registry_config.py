"""Reading config files: inheritance, overrides, origins, mistakes."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwrap.registry import (
    Config,
    ConfigError,
    config_from_dict,
    dump_config,
    format_config,
    load_config,
)

Write = Callable[[str, str], Path]

BASE = """\
seed: 1
optimizer: {type: AdamW, lr: 1e-3, betas: [0.9, 0.99]}
wrapper:
  type: ddp
  static_graph: true
stages:
  - {x: 1}
  - x: 2
"""


@pytest.fixture
def child(write: Write) -> str:
    write("base.yaml", BASE)
    write("more.yaml", "seed: 7\nextra: {deep: {a: 1}}\n")
    write(
        "child.yaml",
        "_base_: [base.yaml, more.yaml]\nwrapper:\n  _delete_: true\n  type: single\n"
        "run_dir: runs/${name}\noptimizer:\n  lr: 0.5\n",
    )
    return "child.yaml"


def refused(name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides)
    return str(caught.value)


def test_files_build_on_others(child: str) -> None:
    cfg = load_config(child)
    assert cfg.seed == 7
    assert cfg.wrapper == {"type": "single"}
    assert cfg.optimizer == {"type": "AdamW", "lr": 0.5, "betas": [0.9, 0.99]}
    assert cfg["extra"]["deep"].a == 1
    assert cfg.run_dir == "runs/child"
    assert "_base_" not in cfg
    assert cfg.path == Path("child.yaml").absolute()


def test_every_value_knows_its_origin(child: str) -> None:
    cfg = load_config(child, ["stages.1.x=5", "new.key=on"])
    assert cfg.origin("seed") == "more.yaml:1"
    assert cfg.origin("optimizer.betas") == "base.yaml:2"
    assert cfg.origin("optimizer.lr") == "child.yaml:7"
    assert cfg.origin("wrapper.type") == "child.yaml:4"
    assert cfg.origin("stages.0.x") == "base.yaml:7"
    assert cfg.origin("stages.1.x") == "override stages.1.x=5"
    assert cfg.origin("run_dir") == "child.yaml:5"
    assert cfg.origin("optimizer.absent") == "child.yaml:6"
    assert cfg.origin("name") == "the file name of child.yaml"
    assert cfg.select("new.key") is True


def test_origins_are_shown_next_to_the_values(child: str) -> None:
    lines = format_config(load_config(child, ["seed=3"]), origins=True).splitlines()
    assert lines[0].split("  #") == [
        "seed: 3".ljust(len(lines[0].split("  #")[0])),
        " override seed=3",
    ]
    assert "  lr: 0.5" in [line.partition("#")[0].rstrip() for line in lines]
    assert any(line.endswith("# base.yaml:2") for line in lines)


MUON = {"type": "Muon", "lr": 2}
COMMON = """\
seed: 1
optimizer: {type: AdamW, lr: 0.1, betas: [0.9, 0.99]}
freeze: [a, b, c]
opts: {type: SGD, lr: 3}
rate: ${optimizer.lr}
"""


@pytest.mark.parametrize(
    ("change", "path", "value", "line"),
    [("seed: 7", "seed", 7, 2), ("optimizer: {lr: 0.5}", "optimizer.lr", 0.5, 2),
     ("optimizer: {lr: 0.5}", "rate", 0.5, 5), ("freeze: [d]", "freeze", ["d"], 2),
     ("optimizer: {_delete_: true, type: Muon, lr: 2}", "optimizer", MUON, 2),
     ("optimizer: ${opts}", "optimizer.lr", 3, 2)],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["yaml", "py"])
def test_a_base_undoes_only_what_it_sets(
    write: Write, change: str, path: str, value: object, line: int, suffix: str
) -> None:
    write("common.yaml", COMMON)
    write("a.yaml", f"_base_: common.yaml\n{change}\n")
    write("b.yaml", "_base_: common.yaml\ntrain: {max_epochs: 9}\n")
    write("b.py", "config = {'_base_': 'common.yaml', 'train': {'max_epochs': 9}}\n")
    write("top.yaml", f"_base_: [a.yaml, b.{suffix}]\n")
    cfg = load_config("top.yaml")
    assert cfg.select(path) == value
    assert cfg.origin(path) == f"{'common' if path == 'rate' else 'a'}.yaml:{line}"
    assert cfg.train.max_epochs == 9


@pytest.mark.parametrize(
    ("text", "line", "phrases"),
    [
        ("model:\n  type: X\n   net: {type: Y}\n", 3,
         ["`net` begins in column 4", "column 3 like `type` in line 2 or 1 like `model`"]),
        ("model:\n   type: X\n  net: {type: Y}\n", 3,
         ["`net` begins in column 3", "column 4 like `type` in line 2"]),
        ("seed: 1\n train: {}\n", 2, ["`train` begins in column 2", "column 1 like `seed`"]),
        ("hooks:\n  - a: 1\n    b: 2\n   c: 3\n", 4, ["column 5 like `b` in line 3"]),
        ("model:\n  type:X\n  net: 3\n", 2, ["a space is missing after `type:`"]),
        ("model:\n  type X\n  net: 3\n", 2, ["a colon with a space is missing in `type X`"]),
        ("a:\n  - {b: 1}\n  -{b: 1}\n", 3, ["a space is missing after the dash"]),
        ("model: {type: X, net: {type: Y}\noptimizer: {lr: 1}\n", 1, ["the { in column 8 is not"]),
        ("model: {type: X,\n  net: {},\n  width: 3\n# comment\n\nseed: 1\n", 3,
         ["the { in column 8 of line 1 is not closed"]),
        ("freeze: [a, b\nseed: 1\n", 1, ["the [ in column 9 is not closed, or a comma"]),
        ("freeze: [a, b\n", 1, ["the [ in column 9 is not closed"]),
        ("model: {a: 1 b: 2}\n", 1, ["the { in column 8", "a comma is missing"]),
        ("name: \"abc\nseed: 3\n", 1, ["the quote in column 7 is not closed"]),
        ("model: {type: X}}\nseed: 1\n", 1, ["no bracket is open"]),
        ("name: a: b\n", 1, ["need quotes"]),
    ],
)  # fmt: skip
def test_a_mistake_of_syntax_has_its_line_and_remedy(
    write: Write, text: str, line: int, phrases: list[str]
) -> None:
    write("a.yaml", text)
    message = refused("a.yaml")
    assert message.startswith(f"a.yaml:{line}: not valid YAML: ")
    assert all(phrase in message for phrase in phrases), message


def test_bases_without_a_common_order_are_refused(write: Write) -> None:
    write("common.yaml", "seed: 1\n")
    write("a.yaml", "_base_: common.yaml\n")
    write("b.yaml", "_base_: common.yaml\n")
    write("ab.yaml", "_base_: [a.yaml, b.yaml]\n")
    write("ba.yaml", "_base_: [b.yaml, a.yaml]\n")
    write("top.yaml", "seed: 2\n_base_:\n- a.yaml\n- common.yaml\n")
    order = r"top\.yaml:2: _base_: common\.yaml must .*before a\.yaml"
    assert re.match(order, refused("top.yaml"))
    write("top.yaml", "_base_: [ab.yaml, ba.yaml]\n")
    assert "top.yaml:1: _base_: " in refused("top.yaml")
    assert "a.yaml and b.yaml" in refused("top.yaml")
    write("top.yaml", "_base_: [a.yaml, b.yaml, ./a.yaml]\n")
    assert re.match(r"top\.yaml:1: _base_: a\.yaml .*twice", refused("top.yaml"))


def test_an_interpolated_section_has_the_origin_of_its_interpolation(write: Write) -> None:
    write("a.yaml", "x: {lr: 1}\ny: {lr: 2}\n")
    assert load_config("a.yaml", ["x=${y}"]).origin("x.lr") == "override x=${y}"


def test_each_base_is_read_once(write: Write) -> None:
    write("0.yaml", "seed: 1\n")
    for number in range(1, 40, 2):
        for name in (number, number + 1):
            write(f"{name}.yaml", f"_base_: [{max(number - 2, 0)}.yaml, {number - 1}.yaml]\n")
    write("1.yaml", "_base_: 0.yaml\nseed: 2\n")
    write("2.yaml", "_base_: 0.yaml\n")
    assert load_config("40.yaml").seed == 2


def test_a_config_reads_like_a_mapping(child: str) -> None:
    cfg = load_config(child)
    assert cfg.select("stages.1.x") == 2
    assert cfg.select("stages.9.x", "none") == "none"
    assert not cfg.has("stages.9")
    assert dict(cfg.wrapper) == {"type": "single"}
    assert isinstance(cfg.stages[0], Config)
    assert cfg == cfg.to_dict() == load_config(child)
    assert pickle.loads(pickle.dumps(cfg)) == copy.deepcopy(cfg) == cfg
    with pytest.raises(AttributeError, match="no optimiser; .*keys are seed"):
        _ = cfg.optimiser


def test_dicts_of_python_become_configs() -> None:
    cfg = config_from_dict({"a": {"b": "${name}"}, "c": (1, Path("x"), Path)}, name="mine")
    assert cfg == {"name": "mine", "a": {"b": "mine"}, "c": [1, "x", "pathlib.Path"]}
    with pytest.raises(ConfigError, match=r"a\.0: a config holds numbers"):
        config_from_dict({"a": [object()]})


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1.5E+3", 1500.0), ("-2e2", -200.0), (".5", 0.5), ("1e", "1e"),
     (".inf", float("inf")), ("2020-01-01", "2020-01-01"), ("null", None), ("[1, a]", [1, "a"]),
     ("'1'", "1"), ("", None)],
)  # fmt: skip
def test_values_are_yaml_with_modern_numbers(write: Write, text: str, value: object) -> None:
    write("a.yaml", f"v: {text}\n")
    assert load_config("a.yaml").v == value
    assert load_config("a.yaml", [f"w={text}"]).w == value


def test_python_files_are_configs_too(write: Write) -> None:
    write("base.yaml", BASE)
    write("a.py", "from torch import nn\ndef config():\n    return {'act': nn.ReLU, 'b': (1,)}\n")
    write("b.py", "config = {'_base_': ['a.py', 'base.yaml'], 'seed': 5}\n")
    cfg = load_config("b.py")
    assert cfg.act == "torch.nn.modules.activation.ReLU"
    assert cfg.b == [1]
    assert cfg.origin("b") == "a.py"
    assert cfg.origin("seed") == "b.py"


def test_overrides_follow_lists_and_make_sections(write: Write) -> None:
    write("a.yaml", "a: {list: [{x: 1}, 2, null], e: {f: 1}}\nn: null\n")
    overrides = ["a.list.0.x=2", "a.list.1={y: 3}", "n.q.r=1", "a.list.1.y=4"]
    cfg = load_config("a.yaml", [*overrides, "a.list.2.g=3", "a.e.f=5", "i.j.k=6"])
    assert cfg.to_dict() == {
        "a": {"list": [{"x": 2}, {"y": 4}, {"g": 3}], "e": {"f": 5}},
        "n": {"q": {"r": 1}},
        "i": {"j": {"k": 6}},
        "name": "a",
    }
    assert load_config("a.yaml", ["a=null"]).a is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("a", "override a: an override must read key.path=value"),
        ("'a=1'", "the key 'a must not be in quotes"),
        ("a..b=1", "'a..b' is not a key path such as optimizer.lr"),
        ("a =1", "'a ' is not a key path"),
        ("s=[1,", "s: the value [1, is not valid YAML"),
        ("s=x: y: z", "if it is text, put it in quotes: 's=\"x: y: z\"'"),
        ("s.b=1", "s.b: s is text (a.yaml:2), it has no b"),
        ("a.list.2=1", "a.list.2: the list has 2 items, counted from 0, got 2"),
        ("a.list.x.y=1", "the list has 2 items, counted from 0, got x"),
    ],
)
def test_wrong_overrides_are_named(write: Write, override: str, said: str) -> None:
    write("a.yaml", "a: {list: [1, 2]}\ns: text\n")
    text = refused("a.yaml", override)
    assert text.startswith(f"override {override}: ")
    assert said in text


def test_all_wrong_overrides_are_reported_together(write: Write) -> None:
    write("a.yaml", "a: 1\n")
    assert len(refused("a.yaml", "a", "b=2", "a.c=1").splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "a.yaml:3: a: this key is already set in line 1"),
        ("s:\n  x: 1\n  x: 2\n", "a.yaml:3: x: this key is already set in line 2"),
        ("a: 1\n b: 2\n", "a.yaml:2: not valid YAML"),
        ("a:\tb: 1\n", "indent with spaces, not with tabs"),
        ("a: [1,\n", "a.yaml:2: not valid YAML"),
        ("a: *b\n", "a.yaml:1: not valid YAML: found undefined alias 'b'"),
        ("a: &x [*x]\n", "a.yaml:1: an alias that contains itself"),
        ("a: 1\nb: !!python/name:os.system x\n", "a.yaml:2: a config cannot hold"),
        ("a: 1\non: 2\n", "a.yaml:2: a key must be text or a whole number, got True"),
        ("", "the file is empty"),
        ("- 1\n", "got a list"),
        ("a: 1\n_base_: a.yaml\n", "a.yaml:2: _base_: the files include each other: a.yaml -> a"),
        ("_base_: [aa.yaml]\n", "a.yaml:1: the config file aa.yaml does not exist; did you mean a"),
        ("_base_: 3\n", "a.yaml:1: _base_: must be a file or a list of files, got 3"),
        ("a:\n  _base_: x\n", "a.yaml:2: a._base_: is only allowed at the top of a file"),
        ('"":\n  _base_: x\n', "a.yaml:1: a setting needs a name"),
        ("a: 1\nb: ${c.d}\nc: {e: 1}\n", "a.yaml:2: b: ${c.d} cannot be resolved"),
        ("b: ${c.d}\nc: {e: 1}\n", "did you mean c.e?"),
        ("b: ${b}\n", "a.yaml:1: b: ${b} refers to itself"),
        ("b: ${c}\nc: ${b}\n", "a.yaml:2: c: ${b} refers to itself"),
        ("b: ${c\n", "a.yaml:1: b: ${c is not a valid interpolation: a } is missing"),
        ("b: ${oc.env:NOT_SET_AT_ALL}\n", "Environment variable 'NOT_SET_AT_ALL' not found"),
        ("a:\n  b: ???\n", "a.yaml:2: a.b: a value is required here: give one with a.b=..."),
    ],
)  # fmt: skip
def test_mistakes_in_files_are_reported_with_their_lines(
    write: Write, text: str, said: str
) -> None:
    write("a.yaml", text)
    assert said in refused("a.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef config():\n    return x / 0\n", "a.py:3: ZeroDivisionError: division by zero"),
        ("x = 1\ny = = 2\n", "a.py:2: SyntaxError"),
        ("confg = {}\n", "a.py: the file must define `config`, a dict or a function; did you mean"),
        ("config = 3\n", "a.py: `config` must be (or return) a dict, got int"),
        ("config = {'a': {'b': 3j}}\n", "a.py: a.b: a config holds numbers"),
        ("config = {None: 3}\n", "a.py: None: a key must be a str or int"),
    ],
)
def test_mistakes_in_python_configs_are_reported(write: Write, text: str, said: str) -> None:
    write("a.py", text)
    assert said in refused("a.py")


def test_unreadable_files_are_reported(write: Write, workplace: Path) -> None:
    write("train.yaml", "a: 1\n")
    (workplace / "binary.yaml").write_bytes(b"a: \xff\xfe\n")
    (workplace / "control.yaml").write_bytes(b"a: 1\nb: \x01\n")
    nearest = r"trian\.yaml .*not exist; did you mean train\.yaml\?"
    assert re.search(nearest, refused("trian.yaml"))
    (workplace / "runs/digits").mkdir(parents=True)
    (workplace / "runs/digits/config.yaml").touch()
    nearest = "runs/digit .*not exist; did you mean runs/digits"
    assert re.search(nearest, refused("runs/digit"))
    assert "is a folder" in refused(".")
    assert re.search(r"binary\.yaml: .*read: UnicodeDecodeError", refused("binary.yaml"))
    assert re.search(r"control\.yaml:2: .*'\\x01' .*not allowed", refused("control.yaml"))


def test_merge_keys_and_anchors_keep_the_lines_of_their_definition(write: Write) -> None:
    write("a.yaml", "common: &c\n  x: 1\n  y: 2\nown:\n  <<: *c\n  y: 3\n")
    cfg = load_config("a.yaml")
    assert cfg.own == {"x": 1, "y": 3}
    assert cfg.origin("own.x") == "a.yaml:2"
    assert cfg.origin("own.y") == "a.yaml:6"


def test_many_escaped_interpolations_are_text(write: Write) -> None:
    path = write("a.yaml", "a: '" + "\\${x " * 60 + "'")
    assert load_config(path)["a"] == "${x " * 60


def test_interpolated_sections_are_copied(write: Write) -> None:
    write("a.yaml", "a: {x: 1, l: [1, 2]}\nb: ${a}\nc: n-${a.l.1}\nd: \\${a}\n")
    cfg = load_config("a.yaml")
    assert cfg.b == cfg.a
    assert cfg.c == "n-2"
    assert cfg.d == "${a}"
    assert cfg.origin("b.x") == "a.yaml:2"


def test_modules_next_to_the_config_are_found_from_its_dump(write: Write, workplace: Path) -> None:
    write("in_cwd.py", "")
    write("conf/nearby.py", "")
    write("conf/a.yaml", "imports: [in_cwd, nearby, ../other.py, json]\n")
    cfg = load_config("conf/a.yaml")
    nearby, other = str(workplace / "conf/nearby.py"), str(workplace / "other.py")
    assert cfg.imports == ["in_cwd", nearby, other, "json"]
    dump_config(cfg, "dump.yaml")
    assert load_config("dump.yaml") == cfg


def test_folders_to_import_from_are_relative_to_the_file(write: Write, workplace: Path) -> None:
    write("conf/base.yaml", "import_from: [../src, /abs]\n")
    write("a.yaml", "_base_: conf/base.yaml\n")
    assert load_config("a.yaml").import_from == [str(workplace / "src"), "/abs"]
    assert load_config("a.yaml", ["import_from=[lib]"]).import_from == [str(workplace / "lib")]


def test_the_folder_of_a_run_is_its_run_dir(write: Write) -> None:
    write("old/config.yaml", "run_dir: elsewhere\nname: a\n")
    assert load_config("old/config.yaml").run_dir == "elsewhere"
    write("old/checkpoints/step_1/model.safetensors", "")
    cfg = load_config("old/config.yaml")
    assert (cfg.run_dir, cfg.origin("run_dir")) == ("old", "the folder of old/config.yaml")
    assert load_config("old/config.yaml", ["run_dir=new"]).run_dir == "new"


def test_delete_flags_never_become_settings(write: Write) -> None:
    write("base.yaml", "a: {x: 1}\n")
    write("a.yaml", "_base_: base.yaml\nnew: {_delete_: true, l: [{_delete_: false, y: 1}]}\n")
    cfg = load_config("a.yaml", ["a={_delete_: true, z: 2}"])
    assert cfg.to_dict() == {"a": {"z": 2}, "new": {"l": [{"y": 1}]}, "name": "a"}


def test_shipped_configs_are_loaded_by_name(workplace: Path) -> None:
    assert load_config("digits_ddp").path.name == "digits_ddp.yaml"
    assert "did you mean digits_ddp?" in refused("digit_ddp")


def test_keys_of_files_are_refused_elsewhere(write: Write) -> None:
    """The printed config would lose them."""
    path = write("a.yaml", "model: {type: Net, width: 1}\n")
    for override, said in (
        (
            "model._delete_=true",
            "model._delete_: is only allowed in a section of a file; an override",
        ),
        ("model._base_=a.yaml", "model._base_: is only allowed at the top of a file"),
        ("model={a: {_base_: x}}", "model.a._base_: is only allowed at the top of a file"),
        ("_base_=a.yaml", "_base_: is only allowed at the top of a file"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path, [override])
        assert str(caught.value).startswith(f"override {override}: {said}")
    assert load_config(path, ["model={_delete_: true, type: A}"]).model.to_dict() == {"type": "A"}
    for key in ("_delete_", "_base_"):
        with pytest.raises(ConfigError, match=f"model.{key}: is only allowed "):
            config_from_dict({"model": {key: True}})
    with pytest.raises(ConfigError, match="a setting needs a name"):
        config_from_dict({"": 1})
