#!/bin/bash
# Runs in a container of the bare node image, with an empty folder of this machine at /seed. Standard input is a
# `docker save` archive. Leaves containerd's state in /seed/containerd and the unpacked layers in /seed/layers. The state
# only links to the layers: they are mounted into every node, so no node copies them and all share their page cache.
set -euo pipefail
root=/seed/containerd
containerd --root $root >/seed/containerd.log 2>&1 &
pid=$!
for _ in $(seq 100); do ctr version >/dev/null 2>&1 && break; sleep 0.1; done
ctr -n k8s.io images import --all-platforms --digests --snapshotter overlayfs - >/dev/null
# Unpacked layers are not read again: their blobs go, the JSON (manifests, configs) stays.
ctr -n k8s.io content ls -q | while read -r digest; do
  blob=$root/io.containerd.content.v1.content/blobs/sha256/${digest#sha256:}
  [ "$(head -c1 "$blob")" = "{" ] || ctr -n k8s.io content rm "$digest" >/dev/null
done
kill $pid; wait $pid || true
find $root/io.containerd.content.v1.content/blobs -type f -size +64k -delete
rm -rf $root/tmpmounts
snapshots=$root/io.containerd.snapshotter.v1.overlayfs/snapshots
mkdir /seed/layers
for snapshot in "$snapshots"/*; do
  name=${snapshot##*/}
  mv "$snapshot" /seed/layers/
  ln -s "/kind/layers/$name" "$snapshot"
done
