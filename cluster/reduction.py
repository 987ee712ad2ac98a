"""Sums over all logical replicas, in tree order across workers, at the price of a ring all-reduce.

Each replica of the strategy holds the sums of its block of logical replicas. The vectors are cut into one slice a
replica; an all-to-all brings every slice to its owner, the owner adds the pieces in the order of the tree
(`tree.py`), and an all-gather returns the finished slices: 2 (N-1)/N of the vector sent and received by each, which is
what a ring all-reduce costs, but with the bits of the tree for every N. The ring all-reduce itself adds each slice in
another rotation, so its last bits follow N; `ordered=False` selects it.
"""

import itertools

import tensorflow as tf

from cluster import tree
from cluster.packing import packed, unpacked

# TensorFlow remembers members and shape of a collective under (group key, instance key). Each Reduction takes keys of its
# own, in program order, which is the same on every worker; tf.distribute's own keys count up from 1.
_group_keys = itertools.count(1_000_000)

BUCKET_BYTES = 32 << 20


class Reduction:
    """Reduces lists of tensors over the K logical replicas that the replicas of a strategy hold.

    Args:
      strategy: the tf.distribute strategy; its N replicas hold contiguous blocks of K/N logical replicas each.
      logical_replicas: K; N must divide it.
      ordered: add in tree order (the same bits for every N), or by ring all-reduce (the same sum up to rounding).
      communication: TensorFlow's hint for the implementation, 'auto', 'ring' or 'nccl'. It changes no order.
      bucket_bytes: tensors travel in packs of one type of about this size (default BUCKET_BYTES); cutting changes no bit.
      together: what is added is one list a replica, of all that it hosts, instead of one a logical replica.

    Attributes:
      leaves: how many passes are added up: K, or N if `together`.

    Raises:
      ValueError: if N does not divide K; the message names the numbers of replicas that work.
    """

    def __init__(self, strategy, logical_replicas, ordered=True, communication="auto", bucket_bytes=None, together=False):
        self.replicas = strategy.num_replicas_in_sync
        self.logical_replicas = logical_replicas
        if logical_replicas % self.replicas:
            raise ValueError(
                f"{self.replicas} replicas cannot host {logical_replicas} logical replicas evenly. Use one of "
                f"{tree.divisors(logical_replicas)} replicas, or another number of logical replicas."
            )
        self.leaves = self.replicas if together else logical_replicas
        self.ordered = ordered
        self._hint = communication
        self._bucket_bytes = bucket_bytes or BUCKET_BYTES
        self._nodes = [tree.maximal_nodes(*self.passes(replica)) for replica in range(self.replicas)]
        self.local = {0} if self.replicas == 1 else set()  # the ids of this process's replicas
        if self.replicas > 1:
            self._connect(strategy)

    def _connect(self, strategy):
        """Gives each local device its order of collectives, and learns the order in which TensorFlow ranks replicas.

        Symptom without the token: two devices of one process wait for each other forever. Cause: automatic control
        dependencies put stateful ops of a function in sequence, whatever their device; an op with an ordering token
        is only put in sequence with those that have the same one (tf.distribute's own collectives do so too).
        """
        self._group_key = next(_group_keys)
        self._instance_keys = [itertools.count() for _ in range(self.replicas)]
        self._tokens = []
        for index, device in enumerate(strategy.extended.worker_devices):
            with tf.device(device):
                name = f"collective_order_{self._group_key}_{index}"
                self._tokens.append(tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name))

        def who_is_where():
            replica = replica_id()
            self.local.add(replica)
            return self._gather(replica, tf.constant([float(replica)]))

        by_rank = strategy.experimental_local_results(tf.function(lambda: strategy.run(who_is_where))())[0]
        self._replica_of_rank = [int(r) for r in by_rank]

    def block(self, replica: int) -> tuple[int, int]:
        """The logical replicas [start, stop) that a replica of the strategy hosts."""
        size = self.logical_replicas // self.replicas
        return replica * size, (replica + 1) * size

    def passes(self, replica: int) -> tuple[int, int]:
        """The leaves [start, stop) of the tree that a replica computes."""
        size = self.leaves // self.replicas
        return replica * size, (replica + 1) * size

    def nodes(self, replica: int) -> list[tree.Node]:
        """The tree nodes (start, size) whose sums a replica has to bring along."""
        return self._nodes[replica]

    def __call__(self, replica: int, sums: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """The sums over all leaves. Every replica calls it.

        Args:
          replica: this replica's id in the strategy.
          sums: for each of `nodes(replica)` its list of tensors; shapes and types are the same in every list.
        Returns:
          A list like one of `sums`, equal to the last bit on every replica.
        """
        if self.replicas == 1:
            return tree.root(dict(zip(self._nodes[0], sums, strict=True)), self.leaves, add_lists)
        like = sums[0]
        results = [None] * len(like)
        for bucket in self._buckets(like):
            vectors = [packed([tensors[i] for i in bucket]) for tensors in sums]
            total = self._tree(replica, vectors) if self.ordered else self._ring(replica, vectors)
            for i, piece in zip(bucket, unpacked(total, [like[i].shape for i in bucket]), strict=True):
                results[i] = piece
        return results

    def of_few(self, replica: int, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of a small tensor over the replicas, of one leaf each, the same on all: gathered by each, and added there.

        That sends N times the tensor, but half as many messages after one another as a ring all-reduce.
        """
        if self.replicas == 1:
            return tensor
        return tf.reduce_sum(tf.ensure_shape(self._gather(replica, tensor[None]), [self.replicas, *tensor.shape]), 0)

    def _buckets(self, tensors):
        """The indices of `tensors` in packs of one type and of about `bucket_bytes`, those first that a step knows first.

        The last layers' gradients are finished first, so the list is taken from its end: a pack can be on its way while the
        backward pass goes on. (Collectives run in the order in which they are traced.)
        """
        buckets, filled = [], 0
        for i in sorted(range(len(tensors)), key=lambda i: (tensors[i].dtype.name, -i)):
            size = tensors[i].shape.num_elements() * tensors[i].dtype.size
            if not buckets or tensors[buckets[-1][0]].dtype != tensors[i].dtype or filled + size > self._bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(i)
            filled += size
        return buckets

    def _tree(self, replica, vectors):
        """The sum of one vector a node, [length] each, in tree order."""
        length = vectors[0].shape[0]
        slice_length = -(-length // self.replicas)
        padding = [[0, slice_length * self.replicas - length]]
        slots = max(map(len, self._nodes))  # blocks can consist of unlike numbers of nodes: the rest is sent as zeros
        vectors = vectors + [tf.zeros_like(vectors[0])] * (slots - len(vectors))
        slices = tf.stack([tf.reshape(tf.pad(v, padding), [self.replicas, slice_length]) for v in vectors], axis=1)
        received = tf.ensure_shape(self._all_to_all(replica, slices), slices.shape)
        nodes = {
            node: received[rank, slot]
            for rank, sender in enumerate(self._replica_of_rank)
            for slot, node in enumerate(self._nodes[sender])
        }
        total = tree.root(nodes, self.leaves, tf.add)
        return tf.ensure_shape(self._gather(replica, total), [slice_length * self.replicas])[:length]

    def _ring(self, replica, vectors):
        return tf.raw_ops.CollectiveReduceV2(
            input=tf.add_n(vectors), merge_op="Add", final_op="Id", **self._collective(replica)
        )

    def _all_to_all(self, replica, slices):
        return tf.raw_ops.CollectiveAllToAllV2(input=slices, **self._collective(replica))

    def _gather(self, replica, piece):
        if piece.dtype == tf.bfloat16:  # which this one collective does not take: its bits travel
            return tf.bitcast(self._gather(replica, tf.bitcast(piece, tf.float16)), tf.bfloat16)
        return tf.raw_ops.CollectiveGatherV2(input=piece, **self._collective(replica))

    def _collective(self, replica):
        return {
            "group_size": self.replicas,
            "group_key": self._group_key,
            "instance_key": next(self._instance_keys[replica]),
            "ordering_token": [self._tokens[replica % len(self._tokens)]],
            "communication_hint": self._hint,
        }


def replica_id() -> int:
    """The id of the replica whose part of the program is being traced, in replica context."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


def add_lists(left: list[tf.Tensor], right: list[tf.Tensor]) -> list[tf.Tensor]:
    """The node of two children: their lists added element by element."""
    return [a + b for a, b in zip(left, right, strict=True)]
