"""Settings: every field is documented, unknown ones are refused, budgets have no default, passwords do not print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.coordinator.config import (
    CoordinatorConfig,
    LimitsTable,
    RetentionTable,
    TimingTable,
    read_config,
)
from labeler.budget import budget_for
from labeler.caps import CapsTable
from labeler.errors import InvalidSetting

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "coordinator.md").read_text()
TABLES = {
    "Top level": CoordinatorConfig,
    "`[federation]`": CapsTable,
    "`[limits]`": LimitsTable,
    "`[timing]`": TimingTable,
    "`[retention]`": RetentionTable,
}
GOOD = """
redis_url = "redis://:secret@127.0.0.1:6379/0"
public_url = "https://labels.example.org"
[federation]
instance_epsilon = 10.0
agent_epsilon = "unlimited"
[agents]
instance_epsilon = 4
agent_epsilon = 100.0
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "coordinator.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("title", TABLES)
def test_every_field_is_documented_with_its_default_and_every_documented_field_exists(title: str) -> None:
    section = next(part for part in re.split(r"^## ", DOCUMENT, flags=re.M) if part.startswith(title))
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, flags=re.M))
    fields = TABLES[title].model_fields
    assert set(rows) == set(fields)
    for name, default in rows.items():
        if default.startswith("`"):
            assert default.strip("`").strip('"') == str(fields[name].default).replace("1e-05", "1e-5")
        elif default == "required":
            assert fields[name].is_required()


def test_the_documented_example_is_a_configuration(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", DOCUMENT, flags=re.S)
    assert example is not None
    config = read_config(written(tmp_path, example[1]))
    assert config.home == tmp_path.resolve()
    assert config.federation.cap_nano("instance", config.delta) == budget_for(10.0, 1e-5)
    assert config.federation.cap_nano("agent", config.delta) is None


def test_the_journal_and_backbones_are_looked_for_in_the_home(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text("")
    config = read_config(written(tmp_path, GOOD + '[backbones]\nf1 = "net.toml"\nf2 = "pixels:8"\n'))
    assert config.journal_target == tmp_path.resolve() / "journal.db"
    assert config.backbone("f1") == str(tmp_path.resolve() / "net.toml")
    assert config.backbone("f2") == "pixels:8"
    assert config.backbone("f3") is None
    elsewhere = read_config(written(tmp_path, 'journal = "postgresql://u:p@h/d"\n' + GOOD))
    assert elsewhere.journal_target == "postgresql://u:p@h/d"


def test_passwords_in_urls_do_not_print(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, 'journal = "postgresql://u:hidden@h/d"\n' + GOOD))
    assert "secret" not in repr(config)
    assert "hidden" not in repr(config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "[timing]\npatience = 3\n", "timing.patience: unknown field"),
        (GOOD.replace("instance_epsilon = 10.0\n", ""), "federation.instance_epsilon: is missing"),
        (GOOD.replace("10.0", "1e9"), "federation.instance_epsilon"),
        (GOOD.replace("10.0", "nan"), "federation.instance_epsilon"),
        (GOOD.replace('"unlimited"', '"none"'), "federation.agent_epsilon"),
        (GOOD.replace("https://", "ftp://"), "public_url"),
        ('classes = ["a", "a"]\n' + GOOD, "class names must be different"),
        ('trusted_proxies = ["proxy.example.org"]\n' + GOOD, "trusted_proxies"),
        ('trusted_proxies = ["10.0.0.1/8"]\n' + GOOD, "trusted_proxies"),
        ('trusted_proxies = ["0.0.0.0/0"]\n' + GOOD, "0.0.0.0/0 is everybody"),
        ("[federation", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(said)) as refused:
        read_config(written(tmp_path, text))
    assert "secret" not in str(refused.value)


def test_a_missing_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="cannot read settings file"):
        read_config(tmp_path / "none.toml")
