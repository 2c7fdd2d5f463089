//! The hosts of Amazon's own S3, where `object_store`'s `https://bucket.s3.region.amazonaws.com` is not the one: names
//! with dots, and the partitions of China and of Europe's sovereign cloud.
//!
//! Access points are named by their aliases, which are names like those of buckets.

/// The URL of a bucket, and whether the bucket is named by its host.
pub(crate) fn of_bucket(bucket: &str, region: &str) -> (String, bool) {
    let domain = match region.split('-').next() {
        Some("cn") => "amazonaws.com.cn",
        Some("eusc") => "amazonaws.eu",
        _ => "amazonaws.com",
    };
    // A dot in the name would not match the certificate for *.s3.….amazonaws.com.
    match bucket.contains('.') {
        true => (format!("https://s3.{region}.{domain}"), false),
        false => (format!("https://{bucket}.s3.{region}.{domain}"), true),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_where_amazon_says() {
        for (made, url, by_host) in [
            (of_bucket("b", "us-east-1"), "https://b.s3.us-east-1.amazonaws.com", true),
            (of_bucket("a.b", "us-east-1"), "https://s3.us-east-1.amazonaws.com", false),
            (of_bucket("b", "cn-north-1"), "https://b.s3.cn-north-1.amazonaws.com.cn", true),
        ] {
            assert_eq!(made, (url.to_owned(), by_host));
        }
    }
}
