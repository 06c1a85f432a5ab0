#!/bin/bash
# First program of a machine that stands for one with Docker, an ssh server and the user osd: host.sh KEYS ADDRESS PATHS...
# KEYS has the ssh key of the user. Docker's place has podman, which reads the images of the real machine. The user osd can
# enter PATHS, and the folders above them.
set -euo pipefail
keys=$1 address=$2
shift 2
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /etc/containers
id osd >/dev/null 2>&1 || useradd --create-home --uid 1500 --shell /bin/bash --password '*' osd
install -d -m 700 -o osd /home/osd/.ssh
install -m 600 -o osd "$keys/id_ed25519" /home/osd/.ssh/id_ed25519
install -m 600 -o osd "$keys/id_ed25519.pub" /home/osd/.ssh/authorized_keys
echo "osd ALL=(ALL) NOPASSWD: ALL" >/etc/sudoers.d/osd
chmod 440 /etc/sudoers.d/osd
for path in "$@"; do
    while [ "$path" != / ]; do
        chmod o+x "$path"
        path=$(dirname "$path")
    done
done
cat >/etc/containers/storage.conf <<'Y'
[storage]
driver = "overlay"
graphroot = "/run/containers/storage"
runroot = "/run/containers/run"
[storage.options]
additionalimagestores = ["/var/lib/containers/storage"]
Y
# Ray asks Docker for its runtimes, a question that podman does not know. Health checks of podman need systemd.
cat >/usr/local/bin/docker <<'Y'
#!/bin/sh
[ "$1" = info ] && exec echo "map[runc:{}]"
[ "$1" = run ] && shift && set -- run --no-healthcheck "$@"
exec sudo -n podman --cgroup-manager=cgroupfs --events-backend=none "$@"
Y
chmod 755 /usr/local/bin/docker
ssh-keygen -q -t ed25519 -N "" -f /run/host-key
exec /usr/sbin/sshd -D -e -o HostKey=/run/host-key -o "ListenAddress=$address" -o PidFile=none -o UsePAM=no \
    -o AllowUsers=osd -o PasswordAuthentication=no -o MaxStartups=100
