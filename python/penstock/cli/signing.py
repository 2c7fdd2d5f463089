"""``penstock sign`` and ``penstock verify``: what they take, and what they say of what was done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import penstock
from penstock.cli.failures import handled
from penstock.cli.help import Command, epilog
from penstock.cli.options import (
    Debug,
    Json,
    StorageOption,
    argument,
    completed_paths,
    flag,
    one_of,
    parse_count,
    storage_options,
)
from penstock.cli.output import Output, as_json, plural, printable
from penstock.errors import ConfigError
from penstock.units import rate, size

HASHES = ("sha256", "blake3")

Trust = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A policy in JSON: load only what is signed by whom it trusts.",
        autocompletion=completed_paths,
        rich_help_panel="Trust",
    ),
]


def _file(help_: str, panel: str = "Trust") -> Any:
    return typer.Option(metavar="FILE", help=help_, autocompletion=completed_paths, rich_help_panel=panel)


def _text(metavar: str, help_: str) -> Any:
    return typer.Option(metavar=metavar, help=help_, rich_help_panel="Trust")


def sign_command(
    directory: Annotated[
        str,
        argument(metavar="DIRECTORY", help="A local directory with a checkpoint.", autocompletion=completed_paths),
    ],
    key: Annotated[str | None, _file("The private key (PEM; P-256, P-384 or P-521).", "Who signs")] = None,
    password_file: Annotated[str | None, _file("A file with the key's password.", "Who signs")] = None,
    certificate: Annotated[str | None, _file("The key's certificate (PEM).", "Who signs")] = None,
    certificate_chain: Annotated[
        list[str] | None, _file("Certificates between that and the root. Repeat for more.", "Who signs")
    ] = None,
    sigstore: Annotated[
        bool,
        flag(
            "--sigstore",
            help="Sign by Sigstore, with the workflow's or your own identity.",
            rich_help_panel="Who signs",
        ),
    ] = False,
    identity_token_file: Annotated[
        str | None, _file("For Sigstore: a file with a token of OpenID Connect.", "Who signs")
    ] = None,
    trust_config: Annotated[
        str | None, _file("For Sigstore: the trust configuration of another instance.", "Who signs")
    ] = None,
    version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Numbers with dots; a policy can ask for at least these.")
    ] = None,
    hash: Annotated[  # noqa: A002 - the option's name
        str, one_of(HASHES, typer.Option, "How files are hashed. model_signing's command verifies sha256 only.")
    ] = "sha256",
    signature: Annotated[
        str, typer.Option(metavar="NAME", help="The name of the signature file in the directory.")
    ] = "model.sig",
    verbose: Annotated[bool, flag("--verbose", "-v", help="List each file that is signed.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a manifest and a signature of all files (OpenSSF Model Signing), so that loads can require both."""
    with handled(as_json=json, debug=debug):
        made = penstock.sign(
            directory,
            key=key,
            password=_secret(password_file),
            certificate=certificate,
            certificate_chain=certificate_chain or (),
            sigstore=sigstore,
            identity_token=_secret(identity_token_file),
            trust_config=trust_config,
            hash=hash,  # type: ignore[arg-type]
            version=version,
            signature=signature,
        )
        if json:
            as_json(made._asdict() | {"path": str(made.path), "seconds": round(made.seconds, 6)})
            return
        done = f"{plural(len(made.files), 'file')}, {size(made.nbytes)} signed in {made.seconds:.3f} s: {made.path}"
        lines = [*(made.files if verbose else ()), done, f"digest {made.digest}"]
        Output().lines(map(printable, lines))


def verify_command(
    location: Annotated[
        str,
        argument(
            metavar="LOCATION",
            help="A directory, or a URL: s3://bucket/model/, hf://org/name\\[@revision].",
            autocompletion=completed_paths,
        ),
    ],
    trust: Trust = None,
    key: Annotated[list[str] | None, _file("A public key that is trusted (PEM). Repeat for more.")] = None,
    certificate_chain: Annotated[
        list[str] | None, _file("Certificates that the signer's has to descend from. Repeat for more.")
    ] = None,
    certificate_identity: Annotated[str | None, _text("NAME", "The name in the signer's certificate.")] = None,
    identity: Annotated[str | None, _text("IDENTITY", "The signer's identity in Sigstore.")] = None,
    issuer: Annotated[str | None, _text("URL", "Who vouched for it.")] = None,
    trust_config: Annotated[str | None, _file("Sigstore's trust configuration, for no network.")] = None,
    digest: Annotated[str | None, _text("DIGEST", "The signature file's hash: no other signature will do.")] = None,
    least_version: Annotated[str | None, _text("VERSION", "The least version that will do.")] = None,
    signature: Annotated[str | None, _text("PATH", "The signature file (model.sig in the directory).")] = None,
    readers: Annotated[
        int | None, typer.Option(parser=parse_count, metavar="N", help="Files that are read at a time.")
    ] = None,
    storage_option: StorageOption = None,
    verbose: Annotated[bool, flag("--verbose", "-v", help="List each file that was compared.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Read every file and compare it with the signature, or with the manifest where nobody is named to trust."""
    with handled(as_json=json, debug=debug):
        given = {
            "key": key or None,
            "certificate_chain": certificate_chain or None,
            "certificate_identity": certificate_identity,
            "identity": identity,
            "issuer": issuer,
            "trust_config": trust_config,
            "digest": digest,
            "least_version": least_version,
            "signature": signature,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if trust and given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(cause=f"--trust is a whole policy, and so is {options}", remedy="Give one of the two")
        done = penstock.verify(
            location, trust=trust or given or None, readers=readers, storage_options=storage_options(storage_option)
        )
        if json:
            as_json(done._asdict() | {"seconds": round(done.seconds, 6)})
            return
        speed = rate(done.nbytes, done.seconds)
        by = f"signed by {done.signer}" if done.signer else "compared with a manifest; nobody's signature was asked for"
        lines = [
            *(done.files if verbose else ()),
            f"{plural(len(done.files), 'file')}, {size(done.nbytes)} verified in {done.seconds:.3f} s, {speed}: {by}",
        ]
        lines += [f"version {done.version}"] if done.version else []
        lines += [f"digest {done.digest}"] if done.digest else []
        Output().lines(map(printable, lines))


def _secret(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(location=path, cause=f"the file cannot be read: {why}") from None


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    signs = epilog("sign models/llama-3-8b --key release.pem --version 1.2")
    app.command("sign", cls=Command, epilog=signs)(sign_command)
    verifies = epilog("verify models/llama-3-8b --key release.pub", "verify s3://bucket/model/ --trust policy.json")
    app.command("verify", cls=Command, epilog=verifies)(verify_command)
