#!/bin/bash
# First process of a machine of tests/cluster/machines.py, in its namespaces: machine.sh NAME FOLDER DATA HOSTS COMMAND...
# It builds the file system of the machine, which is an overlay in memory over that of this machine, with DATA as /data,
# and becomes COMMAND.
set -euo pipefail
name=$1 folder=$2 data=$3 hosts=$4
shift 4
hostname "$name"
mount -t tmpfs -o size=4g tmpfs "$folder"
mkdir "$folder"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"
cd "$folder/root"
mount --rbind /dev dev
mount --make-rslave dev
mount -t tmpfs -o size=1g,mode=1777 tmpfs dev/shm
mount --rbind /sys sys
mount --make-rslave sys
mount -t proc proc proc
mkdir -p data old tmp/ray
mount --bind "$data" data
mount -t tmpfs tmpfs tmp/ray
cp "$hosts" etc/hosts
pivot_root . old
cd /data
umount -l /old
echo booted
exec "$@"
