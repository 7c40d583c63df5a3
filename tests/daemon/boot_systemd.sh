#!/bin/sh
# Boots systemd on top of this machine's files, which stay as they are: what is written goes into
# memory, and with the last process all of it is gone. To be run as the first process of namespaces
# of its own, of mounts, processes, network, cgroups, names and IPC.
#
#   boot_systemd.sh FOLDER PYTHON SITE
#
# FOLDER has `units`, `app`, `model`, the command `umbel` and its `umbel.toml`. The daemon's user sees no
# homes, so PYTHON, the prefix of an installation, and SITE, its packages, are mounted below /opt/umbel.
set -eu
folder=$1 python=$2 site=$3

mount --make-rprivate /
mkdir -p "$folder/memory"
mount -t tmpfs tmpfs "$folder/memory"
cd "$folder/memory"
mkdir upper work root
mount -t overlay overlay -o "lowerdir=/,upperdir=$PWD/upper,workdir=$PWD/work" root
cd root

mount -t proc proc proc
# These two are the whole machine's.
for each in sys sysrq-trigger; do
    [ -e "proc/$each" ] || continue
    mount --bind "proc/$each" "proc/$each"
    mount -o remount,bind,ro "proc/$each"
done
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=1777 tmpfs var/tmp
mount -t tmpfs -o mode=755 tmpfs dev
for each in null zero full random urandom tty; do
    : >"dev/$each"
    mount --bind "/dev/$each" "dev/$each"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd

take() {
    mkdir -p "opt/umbel/$2"
    mount --bind "$1" "opt/umbel/$2"
    mount -o remount,bind,ro "opt/umbel/$2"
}
rm -rf opt/umbel etc/umbel
take "$folder/units" units
take "$folder/app" app
take "$python" python
take "$site" site
take "$folder/model" model
mkdir -p usr/local/bin opt/umbel/log etc/umbel
cp --remove-destination "$folder/umbel" usr/local/bin/umbel
cp "$folder/umbel.toml" etc/umbel/umbel.toml

mkdir old
pivot_root . old
umount -l /old
cd /
echo booting
# Units and generators of this machine stay out of it.
exec env -i container=umbel PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    SYSTEMD_UNIT_PATH=/opt/umbel/units SYSTEMD_GENERATOR_PATH=/nowhere \
    SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/nowhere \
    /lib/systemd/systemd --system --unit=boot.target --show-status=no --log-target=null
