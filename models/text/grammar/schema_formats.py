"""Formats of texts and numbers that a grammar can enforce."""

_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}"
_PREFIX4 = "(3[0-2]|[12]?[0-9])"
_PREFIX6 = "(12[0-8]|1[01][0-9]|[1-9]?[0-9])"


_GROUP = "[0-9a-fA-F]{1,4}"


def _shortened(left: int) -> str:
    """An IPv6 address in which `::` stands for one or more groups of zeros."""
    before = f"{_GROUP}(:{_GROUP}){{{left - 1}}}" if left else ""
    after = f"({_GROUP}(:{_GROUP}){{0,{6 - left}}})?" if left < 7 else ""  # noqa: PLR2004
    return f"{before}::{after}"


_EVEN = "25[024]|(2[0-4]|1[0-9]|[1-9])?[02468]"


def _ipv4_network() -> str:
    """Addresses with a prefix length; the bits after the prefix are 0."""
    options = [_IPV4, r"0(\.0){3}/0"]
    for octets in range(4):
        zeros = rf"(\.0){{{3 - octets}}}"
        ways = [f"({_multiples(bits)}){zeros}/{8 * octets + bits}" for bits in range(1, 9)]
        options.append(rf"({_OCTET}\.){{{octets}}}({'|'.join(ways)})")
    return "|".join(options)


def _multiples(bits: int) -> str:
    """Octets whose first `bits` bits may be set."""
    listed = "|".join(map(str, range(0, 256, 256 >> bits)))
    return {7: _EVEN, 8: _OCTET}.get(bits, listed)


def _ipv6_network() -> str:
    """Addresses, and prefixes of whole groups; the other groups are 0."""
    options = [_IPV6, f"::/{_PREFIX6}"]
    for count, least in enumerate(_LENGTHS):
        options.append(f"{_GROUP}(:{_GROUP}){{{count}}}::/({least}1[01][0-9]|12[0-8])")
    return "|".join(options)


# Two-digit prefix lengths of at least 1, 2, … groups of 16 bits.
_LENGTHS = (
    "1[6-9]|[2-9][0-9]|", "3[2-9]|[4-9][0-9]|", "4[89]|[5-9][0-9]|", "6[4-9]|[7-9][0-9]|",
    "[89][0-9]|", "9[6-9]|",
)  # fmt: skip
_IPV6 = f"(({_GROUP}:){{7}}{_GROUP}|{'|'.join(map(_shortened, range(8)))})"
# Lengths are those of mail: 64 characters before the @, 254 in all.
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]"
_LABEL = "[0-9A-Za-z](-?[0-9A-Za-z]){0,24}"
_EMAIL = rf"{_ATOM}(\.?{_ATOM}){{0,31}}@({_LABEL}\.){{1,3}}[A-Za-z]{{2,24}}"
_NUMBER = "[0-9]{1,6}"


def _duration(*units: str) -> str:
    """An amount of the first unit, then amounts of the next units, none left out."""
    inner = f"({_duration(*units[1:])})?" if len(units) > 1 else ""
    return f"{_NUMBER}{units[0]}{inner}"


_OF_DAY = "|".join(_duration(*"HMS"[i:]) for i in range(3))
_OF_YEAR = "|".join(_duration(*"YMD"[i:]) for i in range(3))
_DURATION = f"P(({_OF_YEAR})(T({_OF_DAY}))?|T({_OF_DAY})|{_NUMBER}W)"

_UUID = "[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{}[0-9a-fA-F]{{3}}-{}[0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}"
_DIGESTS = {"md5": 32, "sha1": 40, "sha256": 64, "sha384": 96, "sha512": 128}

_TEXTS = {
    "base64": "([0-9A-Za-z+/]{4})*([0-9A-Za-z+/]{2}==|[0-9A-Za-z+/]{3}=)?",
    "base64url": "([0-9A-Za-z_-]{4})*([0-9A-Za-z_-]{2}==|[0-9A-Za-z_-]{3}=)?",
    "cidrv4": f"{_IPV4}/{_PREFIX4}",
    "cidrv6": f"{_IPV6}/{_PREFIX6}",
    "cuid": "[cC][0-9a-z]{8,}",
    "cuid2": "[0-9a-z]+",
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "e164": r"\+[1-9][0-9]{6,14}",
    "email": _EMAIL,
    "fraction": "-?[0-9]+(/[1-9][0-9]*)?",
    "hex": "[0-9A-Fa-f]*",
    "idn-email": _EMAIL,
    "ipv4": _IPV4,
    "ipv4interface": f"{_IPV4}(/{_PREFIX4})?",
    "ipv4network": _ipv4_network(),
    "ipv6": _IPV6,
    "ipv6interface": f"{_IPV6}(/{_PREFIX6})?",
    "ipv6network": _ipv6_network(),
    "ipvanyaddress": f"{_IPV4}|{_IPV6}",
    "ipvanyinterface": f"{_IPV4}(/{_PREFIX4})?|{_IPV6}(/{_PREFIX6})?",
    "ipvanynetwork": f"{_ipv4_network()}|{_ipv6_network()}",
    "json-pointer": "(/([^/~]|~[01])*)*",
    "ksuid": "[0-9A-Za-z]{27}",
    "lowercase": "[^A-Z]*",
    "mac": "([0-9A-F]{2}:){5}[0-9A-F]{2}",
    "nanoid": "[0-9A-Za-z_-]{21}",
    "time": _TIME,
    "ulid": "[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}",
    "uppercase": "[^a-z]*",
    "uuid": _UUID.format("[0-9a-fA-F]", "[0-9a-fA-F]"),
    **{f"uuid{version}": _UUID.format(version, "[89abAB]") for version in range(1, 9)},
    **{f"{name}_hex": f"[0-9A-Fa-f]{{{count}}}" for name, count in _DIGESTS.items()},
    "xid": "[0-9a-vA-V]{20}",
}

PATTERNS = {name: f"^({text})$" for name, text in _TEXTS.items()}
"""Formats as patterns, if the grammar's compiler checks them loosely or not at all."""

COMPILED = {
    "hostname": "hostname",
    "idn-hostname": "hostname",
    "iri": "uri",
    "multi-host-uri": "uri",
    "uri": "uri",
}
"""Formats of the compiler, by its names."""

RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63) + 1, 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**63 - 1),
}
"""OpenAPI's formats of integers, within the compiler's widest bounds."""
