"""TF_CONFIG: read as TensorFlow means it, or refused in one line that names the field."""

import json

import pytest

from cluster import spec

TWO = {"worker": ["a:1", "b:2"]}


def config(cluster=TWO, **task):
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0, **task}})


@pytest.mark.parametrize(
    ("text", "number", "name"),
    [
        (config(index=1), 1, "worker 1"),
        (config(index="1"), 1, "worker 1"),
        (config({"chief": ["c:1"], **TWO}, type="chief"), 0, "chief 0"),
        (config({"chief": ["c:1"], **TWO}, index=1), 2, "worker 1"),
        (config({"worker": ["[::1]:5000"]}), 0, "worker 0"),
    ],
)
def test_a_process_learns_who_it_is(text, number, name):
    member = spec.parse(text)
    assert (member.number, member.name, member.is_chief) == (number, name, number == 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ("{}", "'cluster'"),
        (json.dumps({"clusters": TWO, "task": {"type": "worker", "index": 0}}), "'cluster'"),
        (json.dumps({"cluster": TWO}), "'task'"),
        (config({}), "'cluster'"),
        (config(type="master"), "chief"),
        (config(type="ps"), "'ps'"),
        (config({"worker": ["a:1"], "ps": ["b:1"]}), "'ps'"),
        (config(index=2), "0 to 1"),
        (config(index=-1), "0 to 1"),
        (config(index=0.5), "0 to 1"),
        (config(index=True), "0 to 1"),
        (config(index=None), "0 to 1"),
        (config({"worker": []}), "host:port"),
        (config({"worker": "a:1"}), "host:port"),
        (config({"worker": ["a"]}), "host:port"),
        (config({"worker": ["a:0"]}), "host:port"),
        (config({"worker": ["a:99999"]}), "host:port"),
        (config({"worker": ["grpc://a:1"]}), "host:port"),
        (config({"worker": ["a:1", "a:1"]}), "twice"),
        (config({"chief": ["a:1", "b:1"], "worker": ["c:1"]}), "chiefs"),
    ],
)
def test_an_unusable_tf_config_is_one_line_that_names_the_field(text, says):
    with pytest.raises(spec.ClusterError) as error:
        spec.parse(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_local_cluster_is_read_back_as_its_workers():
    members = [spec.parse(text) for text in spec.local_cluster(["127.0.0.1:5", "127.0.0.1:6", "127.0.0.1:7"])]
    assert [(m.number, m.workers) for m in members] == [(0, 3), (1, 3), (2, 3)]
