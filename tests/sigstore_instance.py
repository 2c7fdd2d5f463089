"""A Sigstore instance of a test's own: an authority for certificates, a log of certificates and one of signatures.

It makes what a client would have got from the three services, so that verification can be tried without a network.
Formats are those of the specifications: RFC 6962 (logs), DSSE, the bundle 0.3 and the log entry ``dsse`` 0.0.1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from signing_keys import Key, new_key

PAYLOAD_TYPE = "application/vnd.in-toto+json"
ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
TIMESTAMPS = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def der(key: Key) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def id_of(key: Key) -> bytes:
    return hashlib.sha256(der(key)).digest()


def signed(key: Key, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


class Instance:
    """An authority and two logs, with keys of their own."""

    def __init__(self) -> None:
        self.authority_key, self.certificate_log, self.log = new_key(), new_key(), new_key()
        self.now = datetime.now(timezone.utc).replace(microsecond=0)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        public = self.authority_key.public_key()
        self.authority = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now - timedelta(days=30))
            .not_valid_after(self.now + timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self.authority_key, hashes.SHA256())
        )

    def trust_config(self, path: Path) -> Path:
        """Writes what a client has to trust."""
        since = {"start": (self.now - timedelta(days=30)).strftime("%Y-%m-%dT%H:%M:%SZ")}

        def log(url: str, key: Key) -> dict[str, Any]:
            held = {"rawBytes": b64(der(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": since}
            return {
                "baseUrl": url,
                "hashAlgorithm": "SHA2_256",
                "publicKey": held,
                "logId": {"keyId": b64(id_of(key))},
            }

        chain = {"certificates": [{"rawBytes": b64(self.authority.public_bytes(serialization.Encoding.DER))}]}
        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log("https://log.invalid", self.log)],
            "certificateAuthorities": [
                {
                    "subject": {"organization": "test", "commonName": "authority"},
                    "uri": "https://authority.invalid",
                    "certChain": chain,
                    "validFor": since,
                }
            ],
            "ctlogs": [log("https://certificates.invalid", self.certificate_log)],
            "timestampAuthorities": [],
        }
        signing = {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            "caUrls": [],
            "oidcUrls": [],
            "rekorTlogUrls": [],
            "rekorTlogConfig": {"selector": "ANY"},
            "tsaUrls": [],
            "tsaConfig": {"selector": "ANY"},
        }
        kind = "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json"
        path.write_text(json.dumps({"mediaType": kind, "trustedRoot": root, "signingConfig": signing}))
        return path

    def sign(self, payload: bytes, identity: str, issuer: str, *, signed_after: timedelta = timedelta(0)) -> bytes:
        """The bundle of what ``identity`` signed, so long after it got a certificate for 10 minutes."""
        key = new_key()
        certificate = self._certificate(key, identity, issuer)
        encoded = f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload
        signature = signed(key, encoded)
        entry = self._entry(certificate, payload, signature, int((self.now + signed_after).timestamp()))
        return json.dumps(
            {
                "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
                "verificationMaterial": {
                    "certificate": {"rawBytes": b64(certificate.public_bytes(serialization.Encoding.DER))},
                    "tlogEntries": [entry],
                },
                "dsseEnvelope": {
                    "payload": b64(payload),
                    "payloadType": PAYLOAD_TYPE,
                    "signatures": [{"sig": b64(signature)}],
                },
            }
        ).encode()

    def _certificate(self, key: Key, identity: str, issuer: str) -> x509.Certificate:
        authority = self.authority_key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now)
            .not_valid_after(self.now + timedelta(minutes=10))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(identity)]), critical=True)
            .add_extension(x509.UnrecognizedExtension(ISSUER, issuer.encode()), critical=False)
        )
        precertificate = builder.sign(self.authority_key, hashes.SHA256()).tbs_certificate_bytes
        when = struct.pack(">Q", int(self.now.timestamp() * 1000))
        entry = id_of(self.authority_key) + len(precertificate).to_bytes(3, "big") + precertificate
        proof = signed(self.certificate_log, b"\0\0" + when + b"\0\1" + entry + b"\0\0")
        timestamp = b"\0" + id_of(self.certificate_log) + when + b"\0\0" + b"\4\3" + _sized(proof)
        listed = _sized(_sized(timestamp))
        octets = b"\4" + (bytes([len(listed)]) if len(listed) < 128 else bytes([0x81, len(listed)])) + listed
        return builder.add_extension(x509.UnrecognizedExtension(TIMESTAMPS, octets), critical=False).sign(
            self.authority_key, hashes.SHA256()
        )

    def _entry(self, certificate: x509.Certificate, payload: bytes, signature: bytes, when: int) -> dict[str, Any]:
        """An entry of a log that has no other."""
        held = b64(certificate.public_bytes(serialization.Encoding.PEM))
        hash_ = {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()}
        spec = {
            "envelopeHash": hash_,
            "payloadHash": hash_,
            "signatures": [{"signature": b64(signature), "verifier": held}],
        }
        body = _canonical({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec})
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"log.invalid - 1\n1\n{b64(root)}\n"
        checkpoint = f"{note}\n— log.invalid {b64(id_of(self.log)[:4] + signed(self.log, note.encode()))}\n"
        promised = {"body": b64(body), "integratedTime": when, "logID": id_of(self.log).hex(), "logIndex": 0}
        return {
            "logIndex": "0",
            "logId": {"keyId": b64(id_of(self.log))},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(when),
            "inclusionPromise": {"signedEntryTimestamp": b64(signed(self.log, _canonical(promised)))},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": b64(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": checkpoint},
            },
            "canonicalizedBody": b64(body),
        }


def _sized(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**(dict.fromkeys(names, False) | allowed))
