"""Who a process is: TF_CONFIG as TensorFlow means it, the two flags, and Slurm's variables; or a line for each mistake."""

import json
import subprocess
import sys

import pytest

from cluster import slurm, spec

TWO = {"worker": ["a:1", "b:2"]}
THREE = {"chief": ["c:1"], **TWO}
PS = {**THREE, "ps": ["d:1"]}


def config(cluster=TWO, **task):
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0, **task}})


def problems(function, *arguments):
    """The lines of the ClusterError that a call raises."""
    with pytest.raises(spec.ClusterError) as error:
        function(*arguments)
    return str(error.value).split("\n")


# TF_CONFIG


@pytest.mark.parametrize(
    ("text", "number", "name"),
    [
        (config(index=1), 1, "worker 1"),
        (config(index="1"), 1, "worker 1"),
        (config(THREE, type="chief"), 0, "chief 0"),
        (config(THREE, index=1), 2, "worker 1"),
        (config(PS, type="ps"), 3, "ps 0"),
        (config({"chief": ["c:1"]}, type="chief"), 0, "chief 0"),
        (config({"worker": ["[::1]:5000"]}), 0, "worker 0"),
        (config({"worker": ["[fd00::a%eth0]:65535", "node-1.my_net.local:1"]}, index=1), 1, "worker 1"),
    ],
)
def test_a_process_learns_who_it_is(text, number, name):
    member = spec.parse(text)
    assert (member.number, member.name, member.is_chief) == (number, name, number == 0)
    assert member.tf_config == text


def test_the_chief_comes_first_in_the_addresses():
    member = spec.parse(config({"worker": ["a:1", "b:2"], "chief": ["c:1"]}, index=1))
    assert (member.addresses, member.workers, member.addresses[member.number]) == (("c:1", "a:1", "b:2"), 3, "b:2")


def test_with_parameter_servers_the_chief_alone_runs_the_program_and_each_process_is_called_by_its_role():
    local = [spec.parse(text) for text in spec.local_cluster(["a:1", "b:1", "c:1", "d:1"], ps=1)]
    assert [m.name for m in local] == ["chief 0", "worker 0", "worker 1", "ps 0"]
    assert [(m.number, m.workers, m.trainers, m.ps) for m in local] == [(i, 4, 1, 1) for i in range(4)]
    assert [local[0].called(i) for i in range(4)] == ["the coordinator", "worker 0", "worker 1", "ps 0"]
    assert [local[0].is_worker(i) for i in range(4)] == [False, True, True, False]
    without = spec.parse(config(THREE))
    assert (without.trainers, without.called(0), without.is_worker(1)) == (3, "the chief", False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "TF_CONFIG is empty"),
        ("{", "not JSON"),
        ("{'cluster': {}}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "JSON object"),
        ("null", "JSON object"),
        ("{}", "'cluster' and 'task'"),
        (json.dumps({"clusters": TWO, "task": {"type": "worker", "index": 0}}), "rename 'clusters' to 'cluster'"),
        (json.dumps({"cluster": TWO}), "lacks 'task'"),
        (json.dumps({"cluster": TWO, "task": {}}), "'task' is {}"),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {}}', "'worker' twice"),
        (config({}), "'cluster' is {}"),
        (config(["a:1"]), """'cluster' is ["a:1"]"""),
        (config(type="master"), "'master' is now 'chief'"),
        (config({"master": ["c:1"], **TWO}), "'master' is now 'chief'"),
        (config(type="evaluator"), "task type is 'evaluator', which follows a training's checkpoints and does nothing else"),
        (config(type="ps"), "task type is 'ps', but the cluster has 'worker'; use one of these, or add 'ps'"),
        (config({"worker": ["a:1"], "ps": ["b:1"]}), "'ps' and no 'chief': with parameter servers the chief coordinates"),
        (config({"chief": ["a:1"], "ps": ["b:1"]}, type="chief"), "has 'ps' and no 'worker'"),
        (config({**PS, "ps": ["a:1"]}), "'a:1' twice, as worker 0 and ps 0"),
        (config({**PS, "ps": []}), "'ps' is []; it must be a list of 'host:port'"),
        (config({"ps": ["b:1"]}), "'ps' and no 'chief' or 'worker'"),
        (config({"wroker": ["a:1"]}), "did you mean 'worker'?"),
        (config({"Chief": ["a:1"], **TWO}), "did you mean 'chief'?"),
        (config({"gpu": ["a:1"], **TWO}), "'gpu', which is unknown: use 'chief', 'worker' or 'ps'"),
        (config(type="workers"), "did you mean 'worker'?"),
        (config(type="chief"), "'chief', but the cluster has 'worker'"),
        (config(type=None), "type is null"),
        (config(type=["worker"]), """type is ["worker"]"""),
        (json.dumps({"cluster": TWO, "task": {"index": 0}}), "no 'type'"),
        (json.dumps({"cluster": TWO, "task": {"type": "worker"}}), "no 'index'; 'worker' has the indices 0 to 1"),
        (config(index=2), "is 2; 'worker' has the indices 0 to 1"),
        (config(index=-1), "is -1; 'worker' has the indices 0 to 1"),
        (config(index=0.5), "is 0.5; 'worker' has the indices 0 to 1"),
        (config(index=True), "is true; 'worker' has the indices 0 to 1"),
        (config(index=None), "is null; 'worker' has the indices 0 to 1"),
        (config(index="one"), "is 'one'; 'worker' has the indices 0 to 1"),
        (config(index="9" * 5000), "'worker' has the indices 0 to 1"),
        (config(THREE, type="chief", index=1), "is 1; 'chief' has the index 0 alone"),
        (config({"worker": []}), "'worker' is []; it must be a list of 'host:port'"),
        (config({"chief": [], **TWO}), "'chief' is []; it must be a list of 'host:port'"),
        (config({"worker": "a:1"}), "'worker' is 'a:1'; it must be a list of 'host:port'"),
        (config({"worker": {"0": "a:1"}}), "it must be a list of 'host:port'"),
        (config({"worker": ["a:1", "a:1"]}), "'a:1' twice, as worker 0 and worker 1"),
        (config({"worker": ["a:1", "A:01"]}), "'a:1' twice, as worker 0 and worker 1"),
        (config({"chief": ["b:2"], **TWO}), "'b:2' twice, as chief 0 and worker 1"),
        (config({"chief": ["a:1", "b:1"], "worker": ["c:1"]}), "2 chiefs, 'a:1' and 'b:1'"),
    ],
    ids=lambda value: value[:60],
)
def test_an_unusable_tf_config_is_one_line_that_names_the_field(text, says):
    (line,) = problems(spec.parse, text)
    assert line.startswith("TF_CONFIG ") and says in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("a", "without a port"),
        ("[::1]", "without a port"),
        ("a:", "with the port ''"),
        ("a:0", "with the port '0'"),
        ("a:65536", "with the port '65536'"),
        ("a:-1", "with the port '-1'"),
        ("a:http", "with the port 'http'"),
        ("a:1.5", "with the port '1.5'"),
        ("a:\u0663", "with the port"),
        ("http://a:1", "with a scheme"),
        ("grpc://a:1", "with a scheme"),
        (":1", "without a host"),
        ("", "empty"),
        ("::1", "brackets"),
        ("fd00::1:5000", "brackets"),
        ("[::g]:1", "IPv6"),
        ("a b:1", "no name"),
        ("a\nb:1", "no name"),
        ("a/b:1", "no name"),
        (1, "no text"),
        (None, "no text"),
        (["a:1"], "no text"),
    ],
)
def test_an_address_is_a_host_and_a_port_and_nothing_else(address, says):
    (line,) = problems(spec.parse, config({"worker": ["x:1", address]}))
    assert says in line and "as number 1" in line and "'host:port'" in line


def test_everything_that_is_wrong_is_told_at_once():
    lines = problems(spec.parse, config({"worker": ["a", "b:0", "c:1", "c:1"], "ps": ["d:1"]}, index=9))
    found = ["'a'", "'b:0'", "'ps'", "'c:1' twice", "index is 9"]
    assert [text for text, line in zip(found, lines, strict=True) if text in line] == found


def test_a_local_cluster_is_read_back_as_its_workers():
    members = [spec.parse(text) for text in spec.local_cluster(["127.0.0.1:5", "127.0.0.1:6", "127.0.0.1:7"])]
    assert [(m.number, m.workers) for m in members] == [(0, 3), (1, 3), (2, 3)]


def test_no_tensorflow_is_needed():
    program = (
        "import sys; from cluster import spec; assert spec.from_environment({}) is None; assert 'tensorflow' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


# --worker_hosts and --task_index


@pytest.mark.parametrize("index", [1, "1"])
def test_the_flags_say_the_same_as_tf_config(index):
    member = spec.from_environment({}, "a:1, b:2", index)
    assert member == spec.parse(config(index=1)) == spec.parse(member.tf_config)


@pytest.mark.parametrize(
    ("worker_hosts", "task_index", "says"),
    [
        ("a:1,b:2", None, "--worker_hosts=a:1,b:2 needs --task_index"),
        ("", 0, "--task_index=0 needs --worker_hosts"),
        ("a:1,b:2", 2, "--task_index=2, but --worker_hosts has the indices 0 to 1"),
        ("a:1,b:2", -1, "--task_index=-1"),
        ("a:1", "x", "--task_index=x, but --worker_hosts has the index 0 alone"),
        ("a:1,,b:2", 0, "--worker_hosts has '' as number 1"),
        ("a:1,b", 0, "--worker_hosts has 'b' as number 1, without a port"),
        ("a:1,b:2,a:1", 0, "'a:1' twice, as 0 and 2"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line_that_names_them(worker_hosts, task_index, says):
    (line,) = problems(spec.from_environment, {}, worker_hosts, task_index)
    assert says in line


# Slurm


def task(**changed):
    """The environment of the second of two tasks, on two nodes, as srun makes it."""
    given = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "gpu[01-02]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NTASKS": "2",
        "SLURM_NODELIST": "gpu[01-02]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "1",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }
    return {name: value for name, value in {**given, **changed}.items() if value is not None}


def test_each_task_of_an_srun_is_a_worker():
    member = spec.from_environment(task())
    assert (member.name, member.addresses) == ("worker 1", ("gpu01:21592", "gpu02:21592"))  # 15000 + 64 * 4711 mod 16384
    assert spec.parse(member.tf_config) == member


def test_tasks_are_numbered_node_by_node_whatever_the_distribution():
    nodes = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_TASKS_PER_NODE": "3,2"}
    block = [("0", "0", "0"), ("1", "0", "1"), ("2", "0", "2"), ("3", "1", "0"), ("4", "1", "1")]
    cyclic = [("0", "0", "0"), ("2", "0", "1"), ("4", "0", "2"), ("1", "1", "0"), ("3", "1", "1")]
    for places in (block, cyclic):
        who = [dict(zip(("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"), place, strict=True)) for place in places]
        members = [spec.from_environment(task(**nodes, **each)) for each in who]
        assert [member.number for member in members] == [0, 1, 2, 3, 4]
        assert len({member.addresses for member in members}) == 1
    assert members[0].addresses == ("a:21592", "a:21593", "a:21594", "b:21592", "b:21593")


def test_older_names_of_the_variables_are_read_too():
    step = {name: None for name in task() if name.startswith("SLURM_STEP_") and name != "SLURM_STEP_ID"}
    assert (
        spec.from_environment(task(**step)) == spec.from_environment(task(SLURM_NODEID=None)) == spec.from_environment(task())
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": None},  # the body of a batch script: SLURM_PROCID is 0 there
        {"SLURM_STEP_ID": "4294967291"},  # SLURM_BATCH_SCRIPT in slurm.h
        {"SLURM_STEP_ID": "4294967290"},  # SLURM_INTERACTIVE_STEP
        {"SLURM_STEP_ID": "4294967292"},  # SLURM_EXTERN_CONT
        {"SLURM_STEP_ID": "batch"},
        {"SLURM_PROCID": None},
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun --ntasks=1 in a larger allocation
    ],
)
def test_what_is_no_srun_of_several_tasks_is_no_cluster(changed):
    assert spec.from_environment(task(**changed)) is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"SLURM_STEP_NUM_TASKS": "3"}, "SLURM_STEP_TASKS_PER_NODE=1(x2) and SLURM_STEP_NUM_TASKS=3 do not fit"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "SLURM_STEP_NODELIST=gpu[01-02], SLURM_STEP_TASKS_PER_NODE=2 and"),
        ({"SLURM_STEP_NODELIST": "a,a"}, "SLURM_STEP_NODELIST=a,a"),
        ({"SLURM_STEP_NODELIST": "gpu[01-"}, "SLURM_STEP_NODELIST=gpu[01-"),
        ({"SLURM_STEP_TASKS_PER_NODE": "one"}, "SLURM_STEP_TASKS_PER_NODE=one"),
        ({"SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS=two"),
        ({"SLURM_PROCID": "2"}, "SLURM_PROCID=2, but the step has 2 tasks"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1"),
        ({"SLURM_LOCALID": "1", "SLURM_NODEID": None}, "SLURM_LOCALID=1"),
        ({"SLURM_JOB_ID": None}, "SLURM_JOB_ID is not set"),
        ({"SLURM_STEP_NODELIST": None, "SLURM_NODELIST": None}, "SLURM_STEP_NODELIST or SLURM_NODELIST is not set"),
    ],
)
def test_variables_that_do_not_fit_together_are_one_line_that_names_them(changed, says):
    (line,) = problems(spec.from_environment, task(**changed))
    assert says in line and "TF_CONFIG" in line


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login1", "login1"),
        ("gpu[01-03,07],login1", "gpu01 gpu02 gpu03 gpu07 login1"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]-ib,m[5].net", "n098-ib n099-ib n100-ib n101-ib m5.net"),
    ],
)
def test_host_lists(text, names):
    assert slurm.hosts(text) == names.split()


@pytest.mark.parametrize(
    "text",
    ["", "a,", "a b", "(null)", "a[", "a[]", "a]1[", "a[1-2", "a[[1]]", "a[3-1]", "a[1-]", "a[1-999999999]", "a[1-999][1-999]"],
)
def test_what_is_no_host_list_is_refused(text):
    with pytest.raises(ValueError, match="must be|more than"):
        slurm.hosts(text)


@pytest.mark.parametrize(("text", "counts"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2),1", [1, 2, 2, 1])])
def test_tasks_of_each_node(text, counts):
    assert slurm.tasks_per_node(text) == counts


def test_ports_are_below_the_ephemeral_ones_and_differ_on_a_node():
    for job in (1, 255, 4711, 67_108_863):
        ports = [slurm.port(job, 0, local) for local in range(512)]
        assert len(set(ports)) == 512 and 15_000 <= min(ports) <= max(ports) < 32_768
    assert len({slurm.port(job, 0, local) for job in range(1000, 1256) for local in range(64)}) == 256 * 64
    assert len({slurm.port(4711, step, local) for step in range(4) for local in range(16)}) == 64


# Which of them counts


def test_tf_config_comes_before_the_flags_and_the_flags_before_slurm():
    flags = ("x:1,y:2", 1)
    found = [
        spec.from_environment({"TF_CONFIG": config(), **task()}, *flags),
        spec.from_environment(task(), *flags),
        spec.from_environment(task()),
    ]
    assert [(member.origin, member.addresses[0]) for member in found] == [
        ("TF_CONFIG", "a:1"),
        ("--worker_hosts", "x:1"),
        ("Slurm", "gpu01:21592"),
    ]
    assert spec.from_environment({}) is None


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, False),
        ({"TF_CONFIG": config()}, True),
        ({"TF_CONFIG": "{"}, True),
        (task(), True),
        (task(SLURM_STEP_ID=None), False),
    ],
)
def test_a_cluster_that_cannot_be_used_is_named_all_the_same(environ, named):
    assert spec.environment_names_a_cluster(environ) == named


def test_the_environment_is_this_process_s(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config(index=1))
    assert spec.from_environment().number == 1


def test_an_evaluator_is_no_member_listed_or_not():
    workers = {"worker": ["a:1", "b:1"]}
    for cluster in (workers, {**workers, "evaluator": ["c:1"]}):
        member = spec.parse(json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
        assert (member.number, member.workers, member.addresses) == (1, 2, ("a:1", "b:1"))
        assert json.loads(member.tf_config)["cluster"] == workers  # what TensorFlow is told
        evaluator = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
        assert spec.is_evaluator({"TF_CONFIG": evaluator})
        assert not spec.is_evaluator({"TF_CONFIG": member.tf_config})
    assert not spec.is_evaluator({})
