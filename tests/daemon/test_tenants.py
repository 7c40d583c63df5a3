"""A request's tenant, and its rights: models and priorities."""

import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import pytest

from umbel.daemon.config import Settings, TenantSettings
from umbel.daemon.identity.caller import PRIORITY_HEADER
from umbel.daemon.identity.keys import add_key, revoke_key
from umbel.daemon.identity.tenants import TENANT_HEADER, is_alone, is_monitor

from ..tiny import tiny_model_dir
from .raw import connected, read_reply
from .running import Reply, RunningDaemon, eventually, running

if TYPE_CHECKING:
    from aiohttp import web

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 1,
    "temperature": 0,
}


RULE = "1 to 64 printable characters, no spaces and no '(' in front"


class Office(NamedTuple):
    """A daemon on both transports, and the keys of its tenants."""

    daemon: RunningDaemon
    keys_file: Path
    keys: dict[str, str]

    def ask(
        self,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] = ASK,
        *,
        tcp: bool = False,
        route: str = CHAT,
    ) -> Reply:
        """Post a body over the Unix socket, or over TCP."""
        if not tcp:
            return self.daemon.request("POST", route, dict(body), headers)
        connection = HTTPConnection("127.0.0.1", self.daemon.tcp_port(), timeout=60)
        try:
            connection.request("POST", route, msgspec.json.encode(body), dict(headers or {}))
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def bearer(self, tenant: str, **more: str) -> dict[str, str]:
        """Headers with a tenant's key."""
        extra = {name.replace("_", "-"): value for name, value in more.items()}
        return {"Authorization": f"Bearer {self.keys[tenant]}", **extra}

    def logged(self, reply: Reply) -> str:
        """Return the log line of a request that was answered."""
        assert reply.status == 200, reply.body
        name = reply.headers["x-request-id"]
        line = rf"event=request request={name} .*"
        found: re.Match[str] = eventually(lambda: re.search(line, self.daemon.log()))
        return found[0]

    def tenant(self, reply: Reply) -> str:
        """Whose request the log says it was."""
        found = re.search(r" tenant=(\S+)", self.logged(reply))
        assert found
        return found[1]


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    """Two models and tenants of all kinds; who runs this is the tenant `me`."""
    models = tmp_path_factory.mktemp("models")
    one, two = (tiny_model_dir(models / name, seed=n) for n, name in enumerate(("one", "two")))
    with tempfile.TemporaryDirectory(prefix="u") as folder:
        config, keys_file = Path(folder, "umbel.toml"), Path(folder, "keys.json")
        config.write_text(
            f"""
            port = 0
            api_key = "secret"
            [models.two]
            model = "{two}"
            [models.aliases]
            gpt = "default"
            deux = "two"
            [tenants.me]
            uids = [{os.geteuid()}]
            [tenants.slow]
            priority = "batch"
            [tenants.small]
            models = ["deux"]
            [tenants.none]
            models = []
            [tenants.watch]
            monitor = true
            """
        )
        names = ("research", "slow", "small", "none", "watch")
        keys = {name: add_key(keys_file, name)[1] for name in names}
        keys["gateway"] = add_key(keys_file, "gateway", proxy=True)[1]
        with running(Path(folder), one, "--config", str(config)) as daemon:
            yield Office(daemon, keys_file, keys)


def refusal(reply: Reply) -> tuple[int, str | None]:
    """Status and code of an error."""
    return reply.status, reply.json()["error"]["code"]


class TestIdentity:
    """A key names its tenant; without one the user does on the socket, and TCP has the default."""

    @pytest.mark.parametrize("tcp", [False, True])
    def test_a_key_names_its_tenant(self, office: Office, *, tcp: bool) -> None:
        """On both transports, in either header; the key of the settings is `key`."""
        assert office.tenant(office.ask(office.bearer("research"), tcp=tcp)) == "research"
        old = {"x-api-key": office.keys["research"]}
        assert office.tenant(office.ask(old, tcp=tcp)) == "research"
        assert office.tenant(office.ask({"x-api-key": "secret"}, tcp=tcp)) == "key"

    def test_without_a_key(self, office: Office) -> None:
        """The socket knows the user, and takes what many clients must send for no key."""
        assert office.tenant(office.ask()) == "me"
        assert office.tenant(office.ask({"Authorization": "Bearer unused"})) == "me"
        assert refusal(office.ask(tcp=True)) == (401, "invalid_api_key")
        unused = {"Authorization": "Bearer unused"}
        assert refusal(office.ask(unused, tcp=True)) == (401, "invalid_api_key")

    @pytest.mark.parametrize("tcp", [False, True])
    def test_a_wrong_key(self, office: Office, *, tcp: bool) -> None:
        """An unknown key of umbel's form is refused everywhere, in each dialect."""
        wrong = {"Authorization": f"Bearer {office.keys['research'][:-1]}"}
        reply = office.ask(wrong, tcp=tcp)
        assert refusal(reply) == (401, "invalid_api_key")
        assert "was it revoked?" in reply.json()["error"]["message"]
        body = {**ASK, "max_tokens": 1}
        error = office.ask(wrong, body, tcp=tcp, route=MESSAGES).json()["error"]
        assert error["type"] == "authentication_error"

    def test_keys_come_and_go_while_it_runs(self, office: Office) -> None:
        """A new key works with the next request, and a revoked one no more."""
        key, text = add_key(office.keys_file, "guest")
        headers = {"Authorization": f"Bearer {text}"}
        assert office.tenant(office.ask(headers, tcp=True)) == "guest"
        revoke_key(office.keys_file, key.id)
        assert refusal(office.ask(headers, tcp=True)) == (401, "invalid_api_key")
        assert office.tenant(office.ask(office.bearer("research"), tcp=True)) == "research"
        assert text not in office.daemon.log()

    def test_a_file_of_keys_that_goes_opens_nothing(
        self, short_path: Path, long_tiny_dir: Path
    ) -> None:
        """TCP still asks for keys, and only the file's own keys, once it is back, are valid."""
        config, keys_file = short_path / "umbel.toml", short_path / "keys.json"
        config.write_text("port = 0")
        _, text = add_key(keys_file, "guest")
        kept = keys_file.read_bytes()
        with running(short_path, long_tiny_dir, "--config", str(config)) as daemon:
            office = Office(daemon, keys_file, {"guest": text})
            keys_file.unlink()
            for headers in ({}, office.bearer("guest")):
                assert refusal(office.ask(headers, tcp=True)) == (401, "invalid_api_key")
            assert office.ask().status == 200, "the Unix socket asks for none"
            assert f'"the file of keys is gone" path={keys_file}' in daemon.log()
            keys_file.write_bytes(kept)
            assert office.tenant(office.ask(office.bearer("guest"), tcp=True)) == "guest"

    def test_a_proxy_names_tenants(self, office: Office) -> None:
        """Whom it names, or itself; the name must be one."""
        named = office.bearer("gateway", X_Umbel_Tenant="customer-7")
        assert office.tenant(office.ask(named, tcp=True)) == "customer-7"
        assert office.tenant(office.ask(named)) == "customer-7"
        assert office.tenant(office.ask(office.bearer("gateway"))) == "gateway"
        for name in ("two words", "x" * 65, "", "(shared)"):
            reply = office.ask(office.bearer("gateway") | {TENANT_HEADER: name})
            assert reply.status == 400
            assert reply.json()["error"]["param"] == TENANT_HEADER
            assert RULE in reply.json()["error"]["message"]

    def test_a_client_adds_no_name_to_the_proxys(self, office: Office) -> None:
        """Where a proxy passes on the header that its client sent, neither name counts."""
        head = (
            f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{TENANT_HEADER}: victim\r\n"
            f"x-api-key: {office.keys['gateway']}\r\n{TENANT_HEADER}: customer\r\n\r\n"
        )
        with connected(office.daemon.socket) as connection:
            connection.sendall(head.encode())
            assert read_reply(connection).status == 400

    def test_only_proxies_name_tenants(self, office: Office) -> None:
        """Neither by a key, nor by the daemon's own, nor as a user, be it one's own name."""
        for headers in ({}, {"x-api-key": "secret"}, office.bearer("research")):
            for name in ("gateway", "research", "me"):
                reply = office.ask({**headers, TENANT_HEADER: name})
                assert refusal(reply) == (403, "not_a_proxy")
                assert "--proxy" in reply.json()["error"]["message"]
        named = {TENANT_HEADER: "research"}
        assert refusal(office.ask(named, tcp=True)) == (401, "invalid_api_key")


def test_an_open_port_closes_with_the_first_key(short_path: Path, long_tiny_dir: Path) -> None:
    """And stays closed when the last one is revoked: the operator wants keys to be asked for."""
    keys_file = short_path / "k.json"
    with running(short_path, long_tiny_dir, "--port", "0", "--keys-file", str(keys_file)) as daemon:
        office = Office(daemon, keys_file, {})
        assert office.tenant(office.ask(tcp=True)) == "default"
        wrong = {"Authorization": "Bearer umbel-wrong"}
        assert refusal(office.ask(wrong, tcp=True)) == (401, "invalid_api_key")
        key, text = add_key(keys_file, "a")
        assert refusal(office.ask(tcp=True)) == (401, "invalid_api_key")
        assert office.tenant(office.ask({"x-api-key": text}, tcp=True)) == "a"
        revoke_key(keys_file, key.id)
        assert refusal(office.ask(tcp=True)) == (401, "invalid_api_key")
        assert office.tenant(office.ask()) == f"uid:{os.geteuid()}"


class TestModels:
    """A model that a tenant may not use is not there for it."""

    def test_it_is_as_if_there_were_none(self, office: Office) -> None:
        """The answer differs from that for an unknown name in the name alone, on each route."""
        small = office.bearer("small")
        for route, body in (
            (CHAT, ASK),
            ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
            (RESPONSES, {"input": "hi"}),
            (MESSAGES, ASK),
            (f"{MESSAGES}/count_tokens", {"messages": ASK["messages"]}),
            ("/tokenize", {"prompt": "hi"}),
        ):
            replies = [
                office.ask(small, {**body, "model": name}, route=route) for name in ("one", "xyz")
            ]
            texts = [reply.body.decode().replace("'xyz'", "'one'") for reply in replies]
            texts = [re.sub(r"req-\w+", "", text) for text in texts]
            assert [reply.status for reply in replies] == [404, 404]
            assert texts[0] == texts[1]
            assert "'two'" in texts[0]
        for route in ("/v1/models/{}", "/cache?model={}", "/cache/nodes?model={}"):
            found = [
                office.daemon.request("GET", route.format(name), headers=small)
                for name in ("one", "xyz")
            ]
            assert [reply.status for reply in found] == [404, 404]
            assert found[0].body == found[1].body.replace(b"'xyz'", b"'one'")

    def test_its_own_are_served(self, office: Office) -> None:
        """Under all their names, and as the default; the list has no others."""
        small = office.bearer("small")
        listed = office.daemon.request("GET", "/v1/models", headers=small).json()
        assert [model["id"] for model in listed["data"]] == ["two", "gpt", "deux"]
        for name in (None, "two", "deux", "gpt", "default"):
            reply = office.ask(small, {**ASK, "model": name})
            assert (reply.status, reply.json()["model"]) == (200, "two")
        everything = office.daemon.request("GET", "/v1/models").json()
        assert [model["id"] for model in everything["data"]] == ["one", "two", "gpt", "deux"]

    def test_status_tells_of_its_own(self, office: Office) -> None:
        """A model that a tenant may not use is not there; its default is its own."""
        assert office.ask(office.bearer("small")).status == 200  # so that its model is loaded
        told = {
            name: office.daemon.request("GET", "/status", headers=office.bearer(name)).json()
            for name in ("small", "none", "research")
        }
        listed = {name: [slot["name"] for slot in told[name]["models"]] for name in told}
        assert listed == {"small": ["two"], "none": [], "research": ["one", "two"]}
        assert told["none"]["model"] is None
        assert told["research"]["model"]["name"] == "one"
        assert told["small"]["model"]["name"] == "two"

    def test_a_tenant_that_may_use_no_model(self, office: Office) -> None:
        """Gets an empty list, and a 404 without a name too."""
        none = office.bearer("none")
        listed = office.daemon.request("GET", "/v1/models", headers=none).json()
        assert (listed["data"], listed["first_id"]) == ([], None)
        assert refusal(office.ask(none)) == (404, "model_not_found")


class TestMonitor:
    """A tenant that is said to be one sees all, and may do no more than others."""

    def test_it_sees_all(self, office: Office) -> None:
        """Figures of all tenants together, which others do not."""
        assert office.ask().status == 200
        for route, of_all in (("/metrics", "umbel_steps_total"), ("/status", '"engine":{')):
            told = {
                name: office.daemon.request("GET", route, headers=office.bearer(name))
                for name in ("watch", "research")
            }
            assert of_all in told["watch"].body.decode()
            assert of_all not in told["research"].body.decode()
        nodes = [
            office.daemon.request("GET", "/cache/nodes", headers=office.bearer(name)).json()
            for name in ("watch", "research")
        ]
        assert "me" in {node["tenant"] for node in nodes[0]["nodes"]}
        assert "me" not in {node["tenant"] for node in nodes[1]["nodes"]}

    def test_others_see_no_running_requests_but_their_own(self, office: Office) -> None:
        """`/status` has no ids, conversations and counts of others, and no sums."""
        body = {**ASK, "max_tokens": 4000}
        connection, answer = office.daemon.stream(body)
        try:
            answer.readline()
            eventually(lambda: office.daemon.status()["engine"]["running"])
            research = office.bearer("research")
            told = office.daemon.request("GET", "/status", headers=research).json()
        finally:
            answer.close()
            connection.close()
        assert told["models"][0]["requests"] == told["arriving"] == []
        assert "me" not in re.findall(r'"tenant": ?"([^"]+)"', json.dumps(told))
        sums = ("engine", "memory", "ledger", "disk", "stored", "pressure", "waiting", "step_age")
        for of_all in sums:
            assert told[of_all] is None, of_all
        for of_all in ("engine", "disk", "using", "waiting", "queued", "idle_seconds"):
            assert told["models"][0][of_all] is None, of_all

    def test_it_is_no_operator(self, office: Office) -> None:
        """It shares no prompts; and a tenant that a proxy names is none."""
        pin = {"name": "x", "system": "You are one of many.", "shared": True}
        shared = office.ask(office.bearer("watch"), pin, route="/cache/pins")
        assert refusal(shared) == (403, "operator_only")
        named = office.bearer("gateway", X_Umbel_Tenant="watch")
        told = office.daemon.request("GET", "/status", headers=named).json()
        assert told["engine"] is None

    def test_it_is_said_of_one_tenant(self) -> None:
        """The table of `default`, which holds for all without one, makes no other tenant one."""
        tables = {"default": TenantSettings(monitor=True)}
        request = cast("web.Request", SimpleNamespace(headers={}))
        assert is_monitor(request, "default", tables)
        assert not is_monitor(request, "another", tables)


class TestPriority:
    """A request asks for one, and its tenant has a highest."""

    @pytest.mark.parametrize("value", ["high", "", "BATCH"])
    def test_another_is_refused(self, office: Office, value: str) -> None:
        """The message has those there are."""
        reply = office.ask({PRIORITY_HEADER: value})
        assert reply.status == 400
        error = reply.json()["error"]
        assert error["param"] == PRIORITY_HEADER
        assert "send interactive or batch" in error["message"]

    def test_requests_have_theirs(self, office: Office) -> None:
        """It reaches the request, from each protocol."""
        flex = {"service_tier": "flex"}
        assert "priority=" not in office.logged(office.ask())
        for headers, body, route in (
            ({PRIORITY_HEADER: "batch"}, ASK, CHAT),
            ({PRIORITY_HEADER: "batch"}, ASK, MESSAGES),
            ({}, ASK | flex, CHAT),
            ({}, {"input": "hi", "max_output_tokens": 1} | flex, RESPONSES),
            (office.bearer("slow"), ASK, CHAT),
            (office.bearer("slow", X_Umbel_Priority="interactive"), ASK, CHAT),
        ):
            assert "priority=batch" in office.logged(office.ask(headers, body, route=route))
        for tier in ("auto", "default", "priority"):
            fast = office.ask({}, ASK | {"service_tier": tier})
            assert "priority=" not in office.logged(fast)
        assert office.ask({}, ASK | {"service_tier": "slow"}).status == 400

    def test_a_response_names_its_tier(self, office: Office) -> None:
        """As OpenAI's do."""
        body = {"input": "hi", "max_output_tokens": 1}
        tiers = [
            office.ask({}, {**body, "service_tier": tier}, route=RESPONSES).json()["service_tier"]
            for tier in ("auto", "flex")
        ]
        assert tiers == ["default", "flex"]


@pytest.mark.parametrize(
    ("changes", "tenant", "family", "header", "alone"),
    [
        ({}, "default", socket.AF_INET, None, True),
        ({"host": "::1"}, "default", socket.AF_INET6, None, True),
        ({"port": None}, "default", socket.AF_INET, None, False),
        ({"host": "0.0.0.0"}, "default", socket.AF_INET, None, False),  # noqa: S104
        ({"tenants": {"a": TenantSettings()}}, "default", socket.AF_INET, None, False),
        ({}, "key", socket.AF_INET, None, False),
        ({}, "default", socket.AF_UNIX, None, False),
        ({}, "default", socket.AF_INET, "a", False),
    ],
)
def test_the_only_user(
    changes: dict[str, Any], tenant: str, family: int, header: str | None, *, alone: bool
) -> None:
    """Over TCP on loopback, without keys, tables and proxies."""
    peer = SimpleNamespace(family=family)
    headers = {} if header is None else {"X-Umbel-Tenant": header}
    transport = SimpleNamespace(get_extra_info=lambda _: peer)
    request = cast("web.Request", SimpleNamespace(headers=headers, transport=transport))
    assert is_alone(request, tenant, Settings(**{"port": 1, **changes})) == alone
