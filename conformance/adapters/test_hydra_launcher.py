"""Hydra's common tests of launchers, for `hydra/launcher=hpctrain` on this machine."""

from __future__ import annotations

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite

OPTIONS = ["+hydra.launcher.backend=local", "+hydra.launcher.code_snapshot=false"]


def test_launcher_is_found():
    assert "HpctrainLauncher" in [plugin.__name__ for plugin in Plugins.instance().discover(Launcher)]


@pytest.mark.parametrize(("launcher_name", "overrides"), [("hpctrain", OPTIONS)])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=hpctrain", *OPTIONS])]
)
class TestIntegration(IntegrationTestSuite):
    pass
