// What the text of PTX says of its kernels.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvrelay_emulated {

struct PtxEntry {
    // Bytes of each parameter.
    std::vector<uint32_t> sizes;
    // 0 where PTX says nothing.
    uint32_t max_threads = 0;
};

class Ptx {
  public:
    // Nothing where it does not begin as PTX does.
    static std::optional<Ptx> read(std::string text);

    // Times ten: 90 is PTX 9.0.
    int version() const { return version_; }
    // The oldest capability that it can be compiled for.
    int target() const { return target_; }
    std::optional<PtxEntry> entry(const std::string& name) const;

  private:
    std::string text_;
    int version_ = 0, target_ = 0;
};

}  // namespace kvrelay_emulated
