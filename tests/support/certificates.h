// tests/support/certificates.h: certificates made on the spot: an authority, and leaves that it
// signs for 127.0.0.1 and localhost.
#pragma once

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>

#include "config/base/check.h"

namespace fp8kvd::testing {

struct Pem {
  std::string chain;
  std::string key;
};

// What it takes to sign, with the PEM of both halves.
class Authority {
 public:
  explicit Authority(const std::string& name) {
    key_.reset(NewKey());
    certificate_.reset(New(name, key_.get(), nullptr));
    Add(certificate_.get(), NID_basic_constraints, "critical,CA:TRUE");
    FP8KVD_CHECK(X509_sign(certificate_.get(), key_.get(), EVP_sha256()) > 0);
  }

  std::string pem() const { return Text(certificate_.get()); }

  Pem Sign(const std::string& name) const {
    const Key key(NewKey());
    const Certificate leaf(New(name, key.get(), certificate_.get()));
    Add(leaf.get(), NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1");
    FP8KVD_CHECK(X509_sign(leaf.get(), key_.get(), EVP_sha256()) > 0);
    BIO* const bio = BIO_new(BIO_s_mem());
    PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
    return {.chain = Text(leaf.get()), .key = Taken(bio)};
  }

 private:
  struct Free {
    void operator()(X509* certificate) const { X509_free(certificate); }
    void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  };
  using Key = std::unique_ptr<EVP_PKEY, Free>;
  using Certificate = std::unique_ptr<X509, Free>;

  static EVP_PKEY* NewKey() {
    EVP_PKEY* const key = EVP_EC_gen("P-256");
    FP8KVD_CHECK(key != nullptr);
    return key;
  }

  // Of that key; issued by itself where no issuer is given.
  static X509* New(const std::string& name, EVP_PKEY* key, X509* issuer) {
    static long serial = 1;
    X509* const certificate = X509_new();
    X509_set_version(certificate, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial++);
    X509_gmtime_adj(X509_getm_notBefore(certificate), -3600);
    X509_gmtime_adj(X509_getm_notAfter(certificate), 24L * 3600);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
    X509_set_issuer_name(certificate,
                         X509_get_subject_name(issuer == nullptr ? certificate : issuer));
    X509_set_pubkey(certificate, key);
    return certificate;
  }

  static void Add(X509* certificate, int nid, const char* value) {
    X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, nullptr, nid, value);
    FP8KVD_CHECK(extension != nullptr);
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
  }

  static std::string Text(X509* certificate) {
    BIO* const bio = BIO_new(BIO_s_mem());
    PEM_write_bio_X509(bio, certificate);
    return Taken(bio);
  }
  static std::string Taken(BIO* bio) {
    char* data = nullptr;
    const long size = BIO_get_mem_data(bio, &data);
    std::string text(data, static_cast<size_t>(size));
    BIO_free(bio);
    return text;
  }

  Key key_;
  Certificate certificate_;
};

}  // namespace fp8kvd::testing
