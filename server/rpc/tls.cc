#include "server/rpc/tls.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include "config/load.h"

namespace fp8kvd::rpc {
namespace {

constexpr int64_t kPemBytesMax = int64_t{1} << 20;
constexpr std::chrono::seconds kLookAgain(1);

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

Owned<BIO> Reader(const std::string& pem) {
  return Owned<BIO>(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// An encrypted key is refused rather than asked for at a terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

Owned<X509> FirstCertificate(const std::string& pem) {
  const Owned<BIO> reader = Reader(pem);
  return Owned<X509>(PEM_read_bio_X509(reader.get(), nullptr, NoPassphrase, nullptr));
}

// What tells one state of a file from another; a symbolic link is followed.
struct Stamp {
  int64_t seconds = 0;
  int64_t nanoseconds = 0;
  int64_t bytes = 0;
  uint64_t inode = 0;
  bool operator==(const Stamp&) const = default;
};

Stamp StampOf(const std::string& path) {
  struct stat found {};
  if (path.empty() || stat(path.c_str(), &found) != 0) return {};
  return {.seconds = found.st_mtim.tv_sec,
          .nanoseconds = found.st_mtim.tv_nsec,
          .bytes = found.st_size,
          .inode = found.st_ino};
}

// The files, read again when they changed.
class CertificateFiles {
 public:
  CertificateFiles(const config::SecurityOptions& options, Warn warn)
      : options_(options), warn_(std::move(warn)) {}

  // The first time, for the start's error.
  absl::Status Load() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Read();
  }

  bool wants_clients() const { return !options_.tls_client_ca_file.empty(); }

  // gRPC asks before each handshake. NEW hands out what was read since it last asked.
  static grpc_ssl_certificate_config_reload_status Fetch(
      void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<CertificateFiles*>(self)->FetchOwn(config);
  }

 private:
  struct Pem {
    std::string chain;
    std::string key;
    std::string authorities;
  };
  using Stamps = std::array<Stamp, 3>;

  Stamps StampsNow() const {
    return {StampOf(options_.tls_cert_file), StampOf(options_.tls_key_file),
            StampOf(options_.tls_client_ca_file)};
  }

  absl::Status Read() {
    stamps_ = StampsNow();
    Pem pem;
    const std::pair<const std::string*, std::string*> files[] = {
        {&options_.tls_cert_file, &pem.chain},
        {&options_.tls_key_file, &pem.key},
        {&options_.tls_client_ca_file, &pem.authorities}};
    for (const auto& [path, text] : files) {
      if (path->empty()) continue;
      absl::StatusOr<std::string> read = config::ReadFileBounded(*path, kPemBytesMax);
      if (!read.ok()) return read.status();
      if (read->empty() && text == &pem.authorities) {
        return absl::InvalidArgumentError(absl::StrCat(absl::CEscape(*path), ": is empty"));
      }
      *text = *std::move(read);
    }
    absl::Status status = CheckPem(pem.chain, pem.key, pem.authorities);
    if (status.ok()) {
      fresh_ = std::move(pem);
      return status;
    }
    return absl::Status(status.code(),
                        absl::StrCat("tls_cert_file ", absl::CEscape(options_.tls_cert_file), ": ",
                                     status.message()));
  }

  void LookForChange() {
    const auto now = std::chrono::steady_clock::now();
    if (now - looked_ < kLookAgain) return;
    looked_ = now;
    if (StampsNow() == stamps_) return;
    const absl::Status status = Read();
    warn_(status.ok() ? "the TLS files changed; new connections get the new ones"
                      : absl::StrCat("the TLS files changed and cannot be taken, those before stay "
                                     "in use: ",
                                     status.message()));
  }

  grpc_ssl_certificate_config_reload_status FetchOwn(grpc_ssl_server_certificate_config** config) {
    const std::lock_guard<std::mutex> lock(mutex_);
    LookForChange();
    if (!fresh_.has_value()) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair{fresh_->key.c_str(), fresh_->chain.c_str()};
    // gRPC 1.51 aborts without authorities, also where it asks no client for a certificate: then
    // those of our own chain stand in, and nobody is held against them.
    const std::string& authorities = wants_clients() ? fresh_->authorities : fresh_->chain;
    *config = grpc_ssl_server_certificate_config_create(authorities.c_str(), &pair, 1);
    fresh_.reset();
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const config::SecurityOptions options_;
  const Warn warn_;
  std::mutex mutex_;
  // Guarded by mutex_.
  Stamps stamps_;
  std::chrono::steady_clock::time_point looked_;
  std::optional<Pem> fresh_;  // read, and not yet given to gRPC
};

// What gRPC's C++ layer has no factory for: certificates asked for at each handshake.
class ReloadingCredentials final : public grpc::ServerCredentials {
 public:
  explicit ReloadingCredentials(std::unique_ptr<CertificateFiles> files)
      : files_(std::move(files)),
        credentials_(grpc_ssl_server_credentials_create_with_options(
            grpc_ssl_server_credentials_create_options_using_config_fetcher(
                files_->wants_clients() ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                        : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
                &CertificateFiles::Fetch, files_.get()))) {}
  ~ReloadingCredentials() override { grpc_server_credentials_release(credentials_); }
  ReloadingCredentials(const ReloadingCredentials&) = delete;
  ReloadingCredentials& operator=(const ReloadingCredentials&) = delete;

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  const std::unique_ptr<CertificateFiles> files_;
  grpc_server_credentials* const credentials_;
};

}  // namespace

absl::Status CheckPem(const std::string& chain, const std::string& key,
                      const std::string& authorities) {
  ERR_clear_error();
  const Owned<X509> certificate = FirstCertificate(chain);
  const Owned<BIO> key_reader = Reader(key);
  const Owned<EVP_PKEY> private_key(
      PEM_read_bio_PrivateKey(key_reader.get(), nullptr, NoPassphrase, nullptr));
  absl::Status status;
  if (certificate == nullptr) {
    status = absl::InvalidArgumentError(
        "no certificate in PEM form, the daemon's own comes first; write it so");
  } else if (private_key == nullptr) {
    status = absl::InvalidArgumentError(
        "tls_key_file has no private key in PEM form without a passphrase; write it so");
  } else if (X509_check_private_key(certificate.get(), private_key.get()) != 1) {
    status = absl::InvalidArgumentError(
        "the first certificate is not that of the key in tls_key_file; give those that belong "
        "together");
  } else if (!authorities.empty() && FirstCertificate(authorities) == nullptr) {
    status = absl::InvalidArgumentError(
        "tls_client_ca_file has no certificate in PEM form; write those of the authorities");
  }
  ERR_clear_error();
  return status;
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeCredentials(
    const config::SecurityOptions& options, Warn warn) {
  if (options.tls_cert_file.empty()) return grpc::InsecureServerCredentials();
  auto files = std::make_unique<CertificateFiles>(options, std::move(warn));
  absl::Status status = files->Load();
  if (!status.ok()) return status;
  return std::make_shared<ReloadingCredentials>(std::move(files));
}

}  // namespace fp8kvd::rpc
