//! The hosts of Amazon's own S3, where `object_store`'s `https://bucket.s3.region.amazonaws.com` is not the one:
//! access points, FIPS and dual-stack endpoints, and the partitions of China and of Europe's sovereign cloud.
//!
//! Access points are given in a bucket's place by their ARN, `arn:aws:s3:region:account:accesspoint/name`, as AWS's own
//! tools take it; requests are signed for the region in it. Their aliases are names like those of buckets.

/// An access point, taken from its ARN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AccessPoint {
    pub(crate) name: String,
    pub(crate) region: String,
    account: String,
}

/// Whether a location's bucket is given by an ARN, whose last part comes after a slash or a colon.
pub(crate) fn is_arn(text: &str) -> bool {
    text.starts_with("arn:")
}

impl AccessPoint {
    /// The access point that `arn` names, or why it is none that can be read.
    pub(crate) fn parse(arn: &str) -> Result<Self, &'static str> {
        let parts: Vec<_> = arn.splitn(6, ':').collect();
        let [_, _, service, region, account, resource] = parts[..] else {
            return Err("this ARN names no access point");
        };
        let name = resource.strip_prefix("accesspoint").and_then(|rest| rest.strip_prefix(['/', ':']));
        let Some(name) = name.filter(|_| service == "s3") else {
            return Err("this ARN names no access point of S3");
        };
        if region.is_empty() {
            return Err(
                "access points of many regions are not supported, which want signatures of another kind",
            );
        }
        // They become parts of a host's name.
        let plain = |text: &str| {
            !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        };
        if ![name, region, account].into_iter().all(plain) {
            return Err("this ARN names no access point of S3");
        }
        Ok(Self { name: name.to_owned(), region: region.to_owned(), account: account.to_owned() })
    }

    /// What a host begins with that answers for it.
    pub(crate) fn label(&self) -> String {
        format!("{}-{}", self.name, self.account)
    }
}

/// Which of a region's endpoints are wanted: variables and profiles say so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) fips: bool,
    pub(crate) dual_stack: bool,
}

/// The URL of a bucket, and whether the bucket is named by its host.
pub(crate) fn of_bucket(bucket: &str, region: &str, variant: Variant) -> (String, bool) {
    let host = host("s3", region, variant);
    // A dot in the name would not match the certificate for *.s3.….amazonaws.com.
    match bucket.contains('.') {
        true => (format!("https://{host}"), false),
        false => (format!("https://{bucket}.{host}"), true),
    }
}

/// The URL of an access point.
pub(crate) fn of_access_point(point: &AccessPoint, variant: Variant) -> String {
    format!("https://{}.{}", point.label(), host("s3-accesspoint", &point.region, variant))
}

/// The partition of AWS that a region belongs to: each has accounts and buckets of its own.
pub(crate) fn partition(region: &str) -> &str {
    let mut parts = region.split('-');
    match (parts.next(), parts.next()) {
        (Some("cn"), _) => "aws-cn",
        (Some("eusc"), _) => "aws-eusc",
        (Some("us"), Some("gov")) => "aws-us-gov",
        (Some(_), Some(isolated)) if isolated.starts_with("iso") => isolated,
        _ => "aws",
    }
}

fn host(service: &str, region: &str, Variant { fips, dual_stack }: Variant) -> String {
    let fips = if fips { "-fips" } else { "" };
    let dual_stack = if dual_stack { ".dualstack" } else { "" };
    let domain = match region.split('-').next() {
        Some("cn") => "amazonaws.com.cn",
        Some("eusc") => "amazonaws.eu",
        _ => "amazonaws.com",
    };
    format!("{service}{fips}{dual_stack}.{region}.{domain}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_where_amazon_says() {
        let of = |bucket, region, fips, dual_stack| of_bucket(bucket, region, Variant { fips, dual_stack });
        for (made, url, by_host) in [
            (of("b", "us-east-1", false, false), "https://b.s3.us-east-1.amazonaws.com", true),
            (of("a.b", "us-east-1", false, false), "https://s3.us-east-1.amazonaws.com", false),
            (of("b", "cn-north-1", false, false), "https://b.s3.cn-north-1.amazonaws.com.cn", true),
            (of("b", "us-gov-west-1", true, false), "https://b.s3-fips.us-gov-west-1.amazonaws.com", true),
            (of("b", "eu-west-1", false, true), "https://b.s3.dualstack.eu-west-1.amazonaws.com", true),
            (of("b", "us-east-2", true, true), "https://b.s3-fips.dualstack.us-east-2.amazonaws.com", true),
        ] {
            assert_eq!(made, (url.to_owned(), by_host));
        }
    }

    #[test]
    fn access_points_are_taken_from_their_arns() {
        for arn in [
            "arn:aws:s3:us-west-2:123456789012:accesspoint/ap",
            "arn:aws:s3:us-west-2:123456789012:accesspoint:ap",
        ] {
            let point = AccessPoint::parse(arn).unwrap();
            assert_eq!((&*point.name, &*point.region), ("ap", "us-west-2"));
            let url = of_access_point(&point, Variant::default());
            assert_eq!(url, "https://ap-123456789012.s3-accesspoint.us-west-2.amazonaws.com");
        }
        let china = AccessPoint::parse("arn:aws-cn:s3:cn-north-1:1:accesspoint/ap").unwrap();
        let fips = Variant { fips: true, dual_stack: true };
        let url = of_access_point(&china, fips);
        assert_eq!(url, "https://ap-1.s3-accesspoint-fips.dualstack.cn-north-1.amazonaws.com.cn");
    }

    #[test]
    fn other_arns_are_refused() {
        for arn in [
            "arn:aws:s3:::bucket",
            "arn:aws:s3::123:accesspoint/many.mrap",
            "arn:aws:s3-outposts:us-west-2:1:outpost/o/accesspoint/ap",
            "arn:aws:s3-object-lambda:us-west-2:1:accesspoint/ap",
            "arn:aws:s3:evil.example/:1:accesspoint/ap",
            "arn:aws:s3:us-west-2:1:accesspoint/",
            "arn:",
        ] {
            assert!(AccessPoint::parse(arn).is_err(), "{arn}");
        }
    }
}
