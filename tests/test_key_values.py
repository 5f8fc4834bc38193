"""Keys in commands and addresses are found by their names and forms, and are never shown."""

from __future__ import annotations

import json

import pytest
from conftest import fails_with

from agent_r1.config import load_config
from agent_r1.config.key_values import addresses, find_key

WITH_A_KEY = [
    "python s.py --header 'Authorization: Bearer 4711471147114711'",
    "python s.py --header=Authorization:4711",
    "python s.py -H 'Authorization: Basic 4711'",
    'python s.py "Authorization=Bearer 4711"',
    "python s.py --bearer 4711",
    "python s.py --bearer-token 4711",
    "python s.py --auth 4711",
    "python s.py --access-key 4711",
    "python s.py --secret-key 4711",
    "python s.py --client-secret 4711",
    "python s.py --client_secret=4711",
    "python s.py --apikey 4711",
    "python s.py --API-KEY 4711",
    "python s.py --openai-api-key 4711",
    "python s.py --openai-key=4711",
    "python s.py --github-token 4711",
    "python s.py --passwd 4711",
    "python s.py --passphrase 4711",
    "python s.py --pass 4711",
    "python s.py --credentials 4711",
    "curl -u me:4711 http://x",
    "curl --user me:4711 http://x",
    "python s.py --password '4711'",
    "python s.py '--password' '4711'",
    'python s.py "--password=4711"',
    "python s.py password=4711",
    "python s.py token=4711",
    "python s.py api_key:4711",
    "docker run -e=SHOP_KEY=4711 image",
    'docker run -e "shop_key=4711" image',
    "docker run --env shop_key=4711 image",
    "docker run --env 'shop_key=4711' image",
    "env 'shop_key=4711' python s.py",
    "env -u A shop_key=4711 python s.py",
    "env -S 'shop_key=4711 python s.py'",
    "env -- shop_key=4711 python s.py",
    "/bin/env A=4711 python",
    "sh -c 'export shop_key=4711; python s.py'",
    "sh -c \"export SHOP_KEY='4711'; python s.py\"",
    "sh -c 'SHOP_KEY=\"4711\" python s.py'",
    "sh -c 'shop_key=4711 python s.py'",
    'bash -c "shop_key=4711;python s.py"',
    "postgres://me:4711@host/db",
    "python s.py postgresql://me:4711@host/db",
    "python s.py --dsn=postgresql://me:4711@host/db",
    "https://x.org/mcp/4711471147114711471147114711",
    "https://x.org/mcp?sig=4711",
    "https://x.org/mcp?auth=4711",
    "https://x.org/mcp?access_token=4711",
    "https://x.org/mcp?apiKey=4711",
    "https://x.org/mcp?code=4711",
    "https://x.org/mcp?pwd=4711",
    "https://x.org/mcp#token=4711",
    "https://x.org/mcp;token=4711",
    "https://4711@x.org/mcp",
    "https://me%3A4711@x.org/mcp",
    "python s.py sk-ant-api03-4711471147114711",
    "python s.py gho_4711471147114711471147114711",
    "python s.py AIzaSy4711471147114711471147114711471147114",
    "python s.py eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI0NzExIn0.4711471147114711471147114711",
    "python s.py npm_471147114711471147114711471147114711",
    'python s.py --config \'{"apiKey": "4711"}\'',
    'python s.py --config \'{"token":"4711"}\'',
    'python s.py --config={"password":"4711"}',
    "npx x --key=4711",
    "npx x --x-api-key 4711",
    'npx x --header "X-API-Key: 4711"',
    'npx x --header "X-Auth-Token: 4711"',
    'npx x --header "Cookie: a=4711"',
    'npx x --header "Api-Key: 4711"',
    'npx x --header "Authorization:Bearer 4711"',
    "npx x --env-var SHOP_KEY=4711",
    "npx x --env.SHOP_KEY=4711",
]
WITHOUT = [
    "python server.py --max-tokens 5 --tokenizer x --key-file keys.txt mode=fast",
    "env -i python server.py",
    "http://127.0.0.1:9/mcp?profile=shop",
    "npx -y @scope/server /home/me",
    "docker run -i --rm ghcr.io/org/mcp-server-github:1.2.3",
    "docker run -i --rm org/auth:latest",
    "docker run image@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "uvx --from git+https://github.com/a/b#0123456789abcdef0123456789abcdef01234567 server",
    "/nix/store/0c1axgf0m2xjiyv9nq0vcs1z2rw9fn6m-python3-3.11.9/bin/python server.py",
    "python server.py --auth oauth --no-auth x --port 8000 --sort-by-key",
    "python server.py --token-env SHOP_TOKEN --api-key-file /run/secrets/key",
    "sh -c 'server --token=$SHOP_TOKEN --key \"$KEY\"'",
    "npx -y @modelcontextprotocol/server-filesystem-with-long-name /home/me",
    "http://user.example.org:8000/v1",
    "http://[::1]:8000/mcp",
    "gym:/home/me/game.py:Game",
    "python -m server --keyboard us --monkey 5 --author me --bypass x",
    "http://127.0.0.1:8000/mcp/550e8400-e29b-41d4-a716-446655440000",
    "python client.py --keys a",
]


@pytest.mark.parametrize("command", WITH_A_KEY)
def test_a_key_is_found_and_not_named(command):
    name = find_key(command)
    assert name and "4711" not in name


@pytest.mark.parametrize("command", WITHOUT)
def test_what_is_no_key_is_left_alone(command):
    assert find_key(command) is None


@pytest.mark.parametrize("address", ["http://me:4711@h:1/v1", "https://h/v1?api_key=4711"])
@pytest.mark.parametrize(
    "setting",
    ["search.url", "env.url", "env.judge_url", "env.reward_model_url", "env.sandbox", "model.path",
     "data.source", "cold_start.episodes", "env.mcp.shop", "env.name", "env.reward"],
)  # fmt: skip
def test_an_address_with_a_key_is_refused_before_it_is_shown(setting, address):
    with fails_with("key_in_command", setting) as error:
        load_config("small", [f"{setting}={json.dumps(address)}"])
    assert "4711" not in str(error.value)


def test_a_value_that_is_no_yaml_is_not_shown():
    with fails_with("bad_override", "env.mcp.shop") as error:
        load_config("small", ["env.mcp.shop=[env KEY=4711"])
    assert "4711" not in str(error.value)


def test_addresses_are_found_in_values_that_contain_themselves():
    """YAML's `&a [*a]` makes such a list, and thousands of brackets a deep one."""
    loop: list = ["http://one.example"]
    loop.append(loop)
    deep: dict = {"url": "http://two.example"}
    for _ in range(5000):
        deep = {"x": deep}
    found = addresses({"search": {"url": loop}, "env": deep})
    assert sorted(text for _, text in found) == ["http://one.example", "http://two.example"]
    assert ("search.url", "http://one.example") in found
