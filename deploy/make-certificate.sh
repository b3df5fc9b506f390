#!/usr/bin/env bash
# A certificate authority of your own and a certificate of the coordinator, for a rehearsal or a closed network.
#   deploy/make-certificate.sh deploy/tls coordinator labels.example.org
# The first argument is the folder, the others are the names and addresses under which the coordinator is reached.
# Give ca.pem to every party (ca_file in its settings); keep ca.key offline, whoever has it can pose as the coordinator.
set -euo pipefail
umask 077
folder=$1
shift
names=""
for name in "$@"; do
    kind=DNS
    [[ $name =~ ^[0-9.]+$ || $name == *:* ]] && kind=IP
    names="$names,$kind:$name"
done
mkdir -p "$folder"
cd "$folder"
if [[ -e ca.key || -e coordinator.key ]]; then
    echo "$folder holds keys already; remove them first if they shall be replaced" >&2
    exit 1
fi
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -keyout ca.key -out ca.pem \
    -subj "/CN=private-labeler authority" -addext "keyUsage=critical,keyCertSign,cRLSign" 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout coordinator.key -out coordinator.csr \
    -subj "/CN=$1" 2>/dev/null
openssl x509 -req -in coordinator.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -out coordinator.pem \
    -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "${names#,}") 2>/dev/null
rm coordinator.csr
chmod 644 ca.pem coordinator.pem
chmod 755 .  # a container mounts the folder under another user; the keys in it stay their owner's
echo "$folder holds ca.pem (for every party), coordinator.pem and coordinator.key (for the coordinator), ca.key (offline)"
