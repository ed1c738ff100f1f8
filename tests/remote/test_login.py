import pytest
from helpers.ssh_cluster import Laptop, SshCluster, started

pytestmark = pytest.mark.slow


def test_password_and_second_factor_are_asked_once(laptop: Laptop):
    with started(SshCluster(laptop, "alpha", code="246810")) as cluster:
        shown, code = laptop.on_terminal("--on", "alpha", "setup", answers=[("Password:", "246810")])
        assert code == 0, shown
        assert "alpha is ready: Python 3." in shown
        assert f"folder {cluster.home}/hpctrain/project" in shown
        # The connection stays open, so that the second command asks for nothing.
        result = laptop.hpctrain("--on", "alpha", "list")
        assert "No runs in runs." in result.stderr


@pytest.mark.long
def test_jump_host(laptop: Laptop, cluster: SshCluster):
    with started(SshCluster(laptop, "beta")) as inner:
        inner.point_to(inner.port, "ProxyJump alpha")
        assert "beta is ready" in laptop.hpctrain("--on", "beta", "setup").stdout
    assert "Accepted publickey for root" in (cluster.folder / "sshd.log").read_text()


def test_wrong_password_is_one_sentence(laptop: Laptop):
    with started(SshCluster(laptop, "alpha", key=False, password="right")):
        wrong = [("password:", "wrong")] * 3
        shown, code = laptop.on_terminal("--on", "alpha", "list", answers=wrong)
        assert code == 3
        assert shown.splitlines()[-1] == (
            "Error: Cannot log in to alpha: root@127.0.0.1: Permission denied (publickey,password). "
            "Check the login with `ssh alpha`."
        )
        shown, code = laptop.on_terminal("--on", "alpha", "setup", answers=[("password:", "right")])
        assert code == 0, shown


def test_unknown_host_is_one_sentence(laptop: Laptop):
    result = laptop.hpctrain("--on", "nowhere.invalid", "list", check=False)
    assert result.returncode == 3
    assert result.stderr.startswith(
        "Error: Cannot log in to nowhere.invalid: ssh: Could not resolve hostname"
    )
    assert len(result.stderr.splitlines()) == 1
