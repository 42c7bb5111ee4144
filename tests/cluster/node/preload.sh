#!/bin/bash
# Runs in a container of the bare node image, with an empty folder of a plain file system at /seed: overlay cannot stack
# its upper folder on docker's. Standard input is a `docker save` archive. Leaves containerd's state in /var/lib/containerd
# and the unpacked layers in /kind/layers, to which the state only links: all nodes then share them (and their page
# cache) through docker's own overlay, and kind's volume for each node does not copy them.
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
# overlayfs marks a deletion with a character device 0:0, and refuses to make one inside another overlay.
markers=$(find "$snapshots" -type c -exec stat -c '%t:%T %n' {} + | awk '$1 == "0:0"')
[ -z "$markers" ] || { echo "layers with deletions cannot be preloaded: $markers" >&2; exit 1; }
mkdir -p /kind/layers /var/lib/containerd
for snapshot in "$snapshots"/*; do
  name=${snapshot##*/}
  cp -a "$snapshot" /kind/layers/
  rm -rf "$snapshot"
  ln -s "/kind/layers/$name" "$snapshot"
done
cp -a $root/. /var/lib/containerd/
